"""Shows the policy's gain on this machine: three servers, the same programs, more of them than fit.

    python -m experiments.demo                  # the first ten turns of programs like Claude Code's
    TRACE=trace.jsonl python -m experiments.demo

It measures the machine first and makes the pressure to fit (demo_scenario.py has the proportions). Then one
server after the other, each alone, from the same tiers: stock fcfs, a queue in the programs' order, and
`continuum` (demo_servers.py). At the end it checks whether memory was short and the machine the same for all,
and says so if it was not.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from continuum_lmcache.errors import TraceError
from experiments import demo_report
from experiments.client import ServerUnusable
from experiments.demo_scenario import START_FACTOR, WASTE, WINDOWS_TOKENS, Scenario, Work, pressed
from experiments.demo_servers import CONTINUUM, FCFS, ORDER, ROOT, compared, measured
from experiments.selection import Selection
from experiments.server import ServerError
from experiments.sweep.conditions import other_work_s, probe_s
from experiments.tiny_model import make_model

TOTAL_S = 420.0  # for a run, all included; a slow start or two may add a minute. In 300 a slow
# machine ends few of stock vLLM's programs
GENERATOR = "claude-code"  # the fitted one with the most contexts on the GPU at this number of programs
MOST_TURNS = 10  # of a generated program: with all of them a slow machine ends too few in the time
DRAWN = 40  # programs drawn to size the workload before the scenario is known


@dataclass(slots=True)
class Clock:
    """Prints the current step and how long it will take."""

    console: Console
    begun_s: float
    stages: int
    stage: int = 0

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self.begun_s

    def announce(self, what: str, left_s: float) -> None:
        self.stage += 1
        left = f"about {left_s / 60:.1f} min left"
        self.console.print(f"[bold]\\[{self.stage}/{self.stages}][/] {what} ({left})")


def workload(trace: Path | None, seed: int, scenario: Scenario | None = None) -> Selection:
    """The programs of the demo; the whole choice of workload is here.

    Few arrivals of a Poisson process may come half as fast again as its rate, or half as slow: they are
    drawn closer or further apart, so that each seed's come at the scenario's.
    """
    chosen = Selection(seed, trace, GENERATOR, max_context_tokens=WINDOWS_TOKENS[0])
    if trace is None:
        chosen = replace(chosen, most_turns=MOST_TURNS)
    if scenario is None:
        return replace(chosen, count=DRAWN if trace is None else None, jps=1.0)
    chosen = replace(
        chosen,
        count=scenario.programs,
        jps=1.0,
        max_context_tokens=scenario.window_tokens,
        time_scale=scenario.time_scale,
    )
    last_s = chosen.programs(lambda _: None)[-1].arrival_s
    return replace(chosen, jps=scenario.jps * last_s / (scenario.programs - 1)) if last_s else chosen


def demo(trace: Path | None, out: Path, clock: Clock) -> str:
    """Measure, serve, compare; returns the result as Markdown.

    Raises ServerError, ServerUnusable, TraceError.
    """
    chosen = workload(trace, 1)
    drawn = chosen.programs(lambda _: None)  # a bad trace is known before a server starts
    work = Work.of(drawn, limited=trace is not None)
    contenders = (FCFS, ORDER, CONTINUUM)
    clock.stages = 1 + len(contenders)
    clock.announce(
        "measuring this machine: stock vLLM, nothing beside it, one program and then several", TOTAL_S
    )
    model = make_model(ROOT / ".work" / "tiny-model")
    found = measured(chosen, work, model, out)
    scenario = pressed(found, work, TOTAL_S - clock.spent_s, len(contenders))
    clock.console.print(demo_report.scenario_words(found, scenario))
    work_s = scenario.programs / min(scenario.capacity_jps, scenario.jps)
    each_s = START_FACTOR * found.start_s + min(scenario.limit_s, work_s * (1 + WASTE) / 2)
    paths, chosen, probes_s, others = {}, workload(trace, 1, scenario), [probe_s()], list[float]()
    for who in contenders:
        left_s = each_s * (clock.stages - clock.stage)
        sent = f"{scenario.programs} programs, {scenario.limit_s:.0f} s at most"
        clock.announce(f"{who.name}: {sent}", left_s)
        began_s, before_s = time.monotonic(), other_work_s()
        paths[who.name] = compared(who, scenario, chosen, model, out)
        cores_s = (os.cpu_count() or 1) * (time.monotonic() - began_s)
        others.append((other_work_s() - before_s) / cores_s)
        probes_s.append(probe_s())
    return demo_report.write(paths, out, clock.console, demo_report.busy(probes_s, others))


def main(
    trace: Annotated[Path | None, typer.Option(envvar="TRACE", help="Replay a trace file instead.")] = None,
    readme: Annotated[
        bool,
        typer.Option("--readme", help="Also put the result into README.md and experiments/records/demo."),
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("demo-results"),
) -> None:
    """Compare stock fcfs, program order and continuum, all with LMCache, on the small model."""
    clock = Clock(Console(), time.monotonic(), 0)
    try:
        out.mkdir(parents=True, exist_ok=True)
        page = demo(trace, out, clock)
    except (ServerError, ServerUnusable, TraceError, OSError) as error:
        raise SystemExit(f"demo: {error}") from error
    clock.console.print(f"{clock.spent_s:.0f} s in all; tables, figure and the servers' logs are in {out}/")
    if readme:
        demo_report.publish(page, out)


if __name__ == "__main__":
    typer.run(main)
