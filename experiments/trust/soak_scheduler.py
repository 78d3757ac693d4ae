"""Checks that nothing in the scheduler grows without bound: hours of programs in virtual time.

    python -m experiments.trust.soak_scheduler

Programs come at a steady rate: most report their end, some never do, some have no id and are
linked by their prompts. Every minute all that our objects hold is counted, table by table, by
following every attribute from TurnLifecycle: so a new table is found too. The run
fails if a table still grows after the warm-up and has no larger bound of its own.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from unittest.mock import patch

import typer

from continuum_lmcache import engine
from continuum_lmcache.programs.end_claims import MAX_ENDED
from continuum_lmcache.programs.shared_prefixes import MOST_HEADS
from continuum_lmcache.retention.learned import QUEUE_WINDOW
from continuum_lmcache.types import MOST_TENANTS
from experiments.sim.agents import Agents
from experiments.sim.engine import Simulation, schedulers
from experiments.sim.serving import Setup
from experiments.sim.step_time import MACHINES
from experiments.workload import Program, TurnSpec

SAMPLE_S = 60.0
IDLE_S = 600.0  # continuum.program_idle_s and MOST_PROGRAMS of the run are small, so that the
MAX_PROGRAMS = 400  # warm-up reaches them; an hour and 100,000 are the defaults
WARM_S = 2400.0  # idle programs are forgotten, and every CDF window is full
SLACK = 1.25  # the last quarter's peak over the first one's after the warm-up
SMALL = 32  # entries; growth in smaller containers may be noise
LIMITS = {  # bounds that two hours do not reach, or reach by chance
    ".engine.end_claims[].ended": MOST_TENANTS * MAX_ENDED,
    ".engine.admission.shared_prefixes._heads": MOST_HEADS,
    ".engine.learned._delays_s": QUEUE_WINDOW,
}
RECORDED_EVENTS = 10_000  # of the recorder, whose default would take a day to reach
TOOLS = ("bash", "python")
OUR_CONTAINERS = (dict, list, set, frozenset, tuple, deque)
SETUP = Setup(
    policy="continuum",
    machine=replace(MACHINES["a100"], kv_tokens=81_920),
    shared_tokens=0,
    continuum={"program_idle_s": IDLE_S, "max_tenant_share": 0.5},
    tiers={"dram_gb": 16.0},
    merge_steps=16,
)


Samples = list[tuple[float, Counter[str]]]  # virtual time in s, entries by table


def programs(seconds: float, every_s: float, seed: int = 0) -> list[Program]:
    """One every `every_s` on average; 2 to 8 turns, tool gaps of 0.5 to 20 s."""
    rng = random.Random(seed)
    found, at_s = [], 0.0
    while (at_s := at_s + rng.expovariate(1 / every_s)) < seconds:
        manner = rng.choice(("polite", "polite", "polite", "never-last", "unnamed"))
        number = len(found)
        tenant = f"tenant:{number % 50}"
        found.append(Program(f"p{number}", at_s, tuple(turns(rng)), f"{tenant},{manner}"))
    return found


def turns(rng: random.Random) -> list[TurnSpec]:
    """Each prompt is the last one, its answer, and some tokens more."""
    specs: list[TurnSpec] = []
    for _ in range(rng.randint(2, 8)):
        new = rng.randint(100, 600) if specs else rng.randint(500, 4000)
        kept = specs[-1].context_tokens if specs else 0
        gap_s = rng.choice((0.5, 2.0, 20.0))
        specs.append(TurnSpec(kept + new, new, rng.randint(5, 40), rng.choice(TOOLS), "", gap_s))
    return [*specs[:-1], replace(specs[-1], gap_s=None)]


def tables(parts: Any) -> Counter[str]:
    """Entries of every container that our objects hold, by the path to it; a table's own, summed."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    todo: deque[tuple[str, Any]] = deque([("", parts)])
    while todo:
        path, thing = todo.popleft()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, OUR_CONTAINERS):
            found[path] += len(thing)
            inside = thing.values() if isinstance(thing, Mapping) else thing
            todo.extend((f"{path}[]", each) for each in inside)
        elif type(thing).__module__.startswith("continuum_lmcache"):
            todo.extend((f"{path}.{name}", each) for name, each in attributes(thing))
    return found


def attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    """An object's attributes, with or without slots."""
    names = {n for cls in type(thing).__mro__ for n in getattr(cls, "__slots__", ())}
    yield from ((n, getattr(thing, n)) for n in sorted(names) if hasattr(thing, n))
    yield from getattr(thing, "__dict__", {}).items()


class Soak(Simulation):
    """A simulation that counts the tables every minute."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.samples: Samples = []

    def _pass_time(self) -> None:
        super()._pass_time()
        now_s = self.clock.now_s
        if not self.samples or now_s - self.samples[-1][0] >= SAMPLE_S:
            self.samples.append((now_s, tables(self.engines[0].scheduler._parts)))


def soak(seconds: float, every_s: float, setup: Setup = SETUP) -> Soak:
    """Run it to its end; the simulation checks that every request, block and pin was released."""
    load = programs(seconds, every_s)
    with patch.object(engine, "MOST_PROGRAMS", MAX_PROGRAMS), TemporaryDirectory() as folder:
        setup = replace(setup, continuum={**setup.continuum, "run_output_dir": folder})
        with schedulers(setup, load) as (made, clock):
            made[0]._parts.files.recorder.max_events = RECORDED_EVENTS
            run = Soak(partial(Agents, load), setup, made, clock)
            run.run()
    return run


def growing(samples: Samples, warm_s: float, until_s: float) -> dict[str, tuple[int, int]]:
    """Tables whose peak in the last quarter exceeds that of the first one after the warm-up."""
    quarter_s = (until_s - warm_s) / 4
    first = [c for s, c in samples if warm_s <= s < warm_s + quarter_s]
    last = [c for s, c in samples if until_s - quarter_s <= s < until_s]
    found = {}
    for name in set().union(*last):
        before, after = (max(c[name] for c in part) for part in (first, last))
        if after > LIMITS.get(name, SMALL) and after > SLACK * before:
            found[name] = (before, after)
    return found


def main(
    hours: Annotated[float, typer.Option(help="of virtual time")] = 2.0,
    every_s: Annotated[float, typer.Option(help="seconds between two programs")] = 2.5,
) -> None:
    """Exit status 1 if a table grows."""
    seconds = hours * 3600
    run = soak(seconds, every_s)
    found = growing(run.samples, min(WARM_S, seconds / 3), seconds)
    print(f"{len(run.agents.jobs)} programs, {len(run.agents.turns)} turns, {run.engines[0].steps} steps")
    for name, (before, after) in found.items():
        print(f"grows: {name}: {before} -> {after}")
    raise typer.Exit(bool(found))


if __name__ == "__main__":
    typer.run(main)
