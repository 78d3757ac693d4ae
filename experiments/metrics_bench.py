"""What telling the metrics costs each step.    python -m experiments.metrics_bench

A real scheduler with so many turns running, waiting and pinned; medians of microseconds a step. `told`
and `minute` are in the engine's loop, `encoded` is what travels, `exported` is in the API server.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from vllm.v1.metrics.stats import SchedulerStats

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python PATH` as well as -m

from continuum_lmcache.types import Retention
from continuum_lmcache.vllm_plugin.metrics import exporter
from experiments.sweep.cases import ON_DEMAND, Bench
from experiments.sweep.timed import rigs, timed_us

SIZES = ((16, 0, 0), (16, 64, 256), (256, 0, 0))  # turns running, waiting, pinned
KEEP = Retention(2.0, "static-ttl", "fixed")


def measure(bench: Bench, ending_turns: int) -> dict[str, float]:
    """Medians over the bench's rounds; in each step so many turns start and end."""
    costs_us = []
    with rigs(bench) as (rig,):
        scheduler, appraiser = rig.scheduler, rig.scheduler._keeper.appraiser
        for _ in range(bench.rounds):
            rig.step()
            for _ in range(ending_turns):
                appraiser.came_back(("pytest tests", "pytest", "bash"), 1.5)
                appraiser.placed(0.5, True)
                appraiser.observed.kept(("ls",), KEEP)
            told_us, told = timed_us(scheduler._teller.told)
            stats = SchedulerStats(num_running_reqs=bench.running_turns)
            minute_us, _ = timed_us(lambda s=stats, t=told: scheduler._watchman.step(rig.clock.now_s, s, t))
            encoded = msgspec.msgpack.encode(told)
            exported_us, _ = timed_us(lambda t=told: exporter().observe(t, 0))
            costs_us.append((told_us, minute_us, float(len(encoded)), exported_us))
    names = ("told, us", "minute, us", "encoded, bytes", "exported, us")
    return {name: median(column) for name, column in zip(names, zip(*costs_us, strict=True), strict=True)}


def main(rounds: Annotated[int, typer.Option(help="steps a median is taken over")] = 200) -> None:
    """Print the table."""
    table = Table("running / waiting / pinned", "turns that end a step")
    rows = []
    for running, waiting, pinned in SIZES:
        for ending in (0, 4):
            found = measure(Bench(ON_DEMAND, running, waiting, pinned, rounds, 1), ending)
            figures = (f"{value:.0f}" for value in found.values())
            rows.append((f"{running} / {waiting} / {pinned}", str(ending), *figures))
    for name in found:
        table.add_column(name)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
