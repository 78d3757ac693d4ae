"""Measures what lying clients cost honest ones, on vLLM's own scheduler in virtual time.

    python -m experiments.trust.hostile

Victims run twice beside the same foreign load: once with true fields, once with false ones. The ratio of
their P95 job times is the cost of the lie. Beside it are the cost of the load itself, and that of
the same lie under stock fcfs, which ignores all such fields.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `python PATH` as well as -m

from experiments.sim.engine import simulate
from experiments.sim.result import Result
from experiments.sim.serving import STOCK, Setup
from experiments.sim.step_time import MACHINES
from experiments.workload import Program, TurnSpec

KV_TOKENS = 40_960
SHARES = {"max_tenant_share": 0.5, "program_idle_s": 300}
SETUP = Setup(
    policy="continuum",
    machine=replace(MACHINES["a100"], kv_tokens=KV_TOKENS),
    shared_tokens=0,
    continuum=SHARES,
    tiers={"dram_gb": 8.0, "async": True},
)


def agent(name: str, arrival_s: float, tenant: str, turns: int = 6, gap_s: float = 2.0) -> Program:
    """Each prompt is the last one, its answer, and 600 tokens more."""
    specs: list[TurnSpec] = []
    for _ in range(turns):
        kept = specs[-1].context_tokens if specs else 0
        new = 600 if specs else 3000
        specs.append(TurnSpec(kept + new, new, 40, "bash", "", gap_s))
    return Program(name, arrival_s, (*specs[:-1], replace(specs[-1], gap_s=None)), f"tenant:{tenant}")


def never_last(honest: Sequence[Program]) -> list[Program]:
    """Programs that end without a report: their pins stay until the TTL."""
    return [replace(p, source=f"{p.source},never-last") for p in honest]


def always_last(honest: Sequence[Program]) -> list[Program]:
    """Every turn is marked as its program's last, and the next one comes in spite of it."""
    return [replace(p, source=f"{p.source},always-last") for p in honest]


def id_a_turn(honest: Sequence[Program]) -> list[Program]:
    """Every turn under a new id, never ended: one pin for each, at the place of a new program."""
    found = []
    for program in honest:
        at_s = program.arrival_s
        for number, turn in enumerate(program.turns):
            alone = replace(turn, new_tokens=turn.input_tokens, gap_s=None)
            source = f"{program.source},never-last"
            found.append(Program(f"{program.program_id}-{number}", at_s, (alone,), source))
            at_s += (turn.gap_s or 0.0) + 1.0
    return found


def fake_tools(honest: Sequence[Program]) -> list[Program]:
    """The victims' tool reported as slow, so that its distribution leads to long pins for all."""
    return [
        replace(p, turns=tuple(replace(t, gap_s=t.gap_s and 12.0) for t in p.turns))
        for p in never_last(honest)
    ]


def one_id(honest: Sequence[Program]) -> list[Program]:
    """All programs' turns under one id, with the oldest arrival: one endless program."""
    turns: list[TurnSpec] = []
    for program in honest:
        for turn in program.turns:
            turns.append(replace(turn, new_tokens=turn.input_tokens, gap_s=0.5))
    last = replace(turns[-1], gap_s=None)
    first = honest[0]
    return [replace(first, turns=(*turns[:-1], last), source=f"{first.source},never-last")]


ATTACKS: dict[str, Callable[[Sequence[Program]], list[Program]]] = {
    "never-last": never_last,
    "always-last": always_last,
    "id-a-turn": id_a_turn,
    "fake-tools": fake_tools,
    "endless": one_id,
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """P95 job times of the victims, in seconds."""

    alone_s: float
    beside_honest_s: float
    attacked_s: float
    stock_attacked_s: float

    @property
    def ratio(self) -> float:
        """The cost of the lie relative to that of the load."""
        return self.attacked_s / self.beside_honest_s


def verdict(
    attack: Callable[[Sequence[Program]], list[Program]], programs: int = 24, attackers: int = 12
) -> Verdict:
    """Run the four cases."""
    victims = [agent(f"v{i}", i * 1.5, "victims") for i in range(programs)]
    honest = [agent(f"x{i}", i * 3.0, "attacker") for i in range(attackers)]
    stock = replace(SETUP, policy=STOCK)
    return Verdict(
        p95_s(simulate(victims, SETUP)),
        p95_s(simulate([*victims, *honest], SETUP)),
        p95_s(simulate([*victims, *attack(honest)], SETUP)),
        p95_s(simulate([*victims, *attack(honest)], stock)),
    )


def p95_s(result: Result) -> float:
    """Of the victims' job times; nearest rank."""
    times_s = sorted(job.job_s for job in result.jobs if job.program_id.startswith("v"))
    return times_s[max(0, math.ceil(0.95 * len(times_s)) - 1)]


def main(
    programs: Annotated[int, typer.Option(help="of the victims")] = 24,
    attackers: Annotated[int, typer.Option(help="programs of the attacker")] = 12,
) -> None:
    """One row an attack."""
    table = Table("lie", "alone, s", "honest load, s", "lie, s", "ratio", "stock, s", title="victims' P95")
    for name, attack in ATTACKS.items():
        v = verdict(attack, programs, attackers)
        seconds = (v.alone_s, v.beside_honest_s, v.attacked_s)
        table.add_row(name, *(f"{s:.1f}" for s in seconds), f"{v.ratio:.2f}", f"{v.stock_attacked_s:.1f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
