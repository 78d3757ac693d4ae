"""Measures what a query of the fleet costs.    python -m experiments.fleet.cost

CPU time of the thread for one answer, by the number of programs and replicas: a later turn that goes home at
once; one whose home is busy, so that every other replica is compared; a new program's first turn; and a
report. Also the memory of a program, as tracemalloc counts it.
"""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from collections.abc import Iterator
from statistics import median, quantiles
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from continuum_lmcache.fleet.fleet import Fleet, FleetConfig, Route
from continuum_lmcache.fleet.report import ReplicaId, ReplicaReport
from continuum_lmcache.types import ProgramId, TurnId

KEY = b"of no deployment"
GPU_TOKENS = 400_000
PROMPT_TOKENS = 20_000


class BusyFleet:
    """A fleet in which all programs are in a tool call, except `live` turns per replica."""

    def __init__(self, programs: int, replicas: int, live: int = 32) -> None:
        self.fleet = Fleet(FleetConfig(), KEY)
        self.names = [ReplicaId(f"replica-{i}") for i in range(replicas)]
        self.now_s, self._turns = 0.0, 0
        for name in self.names:
            self.fleet.on_replica_join(0.0, self.report(name))
        self.programs = [ProgramId(f"program-{i}@0123456789ab") for i in range(programs)]
        for i, program in enumerate(self.programs):
            turn = self.comes(program, claimed_turns=1)
            self.fleet.on_first_token(turn)
            if i >= live * replicas:
                self.fleet.on_pause(self.now_s, turn, PROMPT_TOKENS)

    def report(self, name: ReplicaId, waits_s: float = 0.0) -> ReplicaReport:
        room = {"headroom_tokens": float(GPU_TOKENS), "oldest_returning_wait_s": waits_s}
        return ReplicaReport(name, self.now_s, GPU_TOKENS, requests=32, **room)

    def comes(self, program: ProgramId, claimed_turns: int = 0) -> TurnId:
        self._turns += 1
        turn = TurnId(f"turn-{self._turns}")
        answer = self.fleet.on_arrival(self.now_s, turn, program, PROMPT_TOKENS + 500, claimed_turns, 60.0)
        assert isinstance(answer, Route)
        return turn

    def hear(self, waits_s: float) -> None:
        """Reports of all replicas."""
        self.now_s += 0.5
        for name in self.names:
            self.fleet.on_report(self.now_s, self.report(name, waits_s))


def samples(busy: BusyFleet, asked: int, seed: int) -> Iterator[tuple[str, float]]:
    """Each kind of query with its times."""
    random_of = random.Random(seed)
    for waits_s, what in ((0.0, "a later turn, home at once"), (1.0, "a later turn, all replicas weighed")):
        busy.hear(waits_s)
        for i in range(asked):
            if i % 100 == 0:
                busy.hear(waits_s)
            program = random_of.choice(busy.programs)
            begun_ns = time.thread_time_ns()
            turn = busy.comes(program)
            yield what, (time.thread_time_ns() - begun_ns) / 1e6
            busy.fleet.on_pause(busy.now_s, turn, PROMPT_TOKENS)
    for i in range(asked):
        if i % 10 == 0:
            busy.hear(0.0)
        begun_ns = time.thread_time_ns()
        turn = busy.comes(ProgramId(f"new-{i}"))
        yield "a new program", (time.thread_time_ns() - begun_ns) / 1e6
        busy.fleet.on_last_turn_end(busy.now_s, turn)
    for _ in range(asked):
        busy.now_s += 0.5
        report = busy.report(random_of.choice(busy.names))
        begun_ns = time.thread_time_ns()
        busy.fleet.on_report(busy.now_s, report)
        yield "a report", (time.thread_time_ns() - begun_ns) / 1e6


def main(
    programs: Annotated[int, typer.Option(min=1)] = 10_000,
    replicas: Annotated[int, typer.Option(min=2)] = 16,
    asked: Annotated[int, typer.Option(min=10, help="of each kind")] = 5_000,
    seed: int = 1,
) -> None:
    """Print a table of milliseconds of CPU time."""
    tracemalloc.start()
    busy = BusyFleet(programs, replicas)
    bytes_each = tracemalloc.get_traced_memory()[0] / programs
    tracemalloc.stop()
    gc.collect()
    gc.disable()  # a collection falls on whoever allocates next
    taken: dict[str, list[float]] = {}
    for what, ms in samples(busy, asked, seed):
        taken.setdefault(what, []).append(ms)
    busy.fleet.check()
    table = Table("ms of CPU time", "median", "p99", "most")
    for what, all_ms in taken.items():
        table.add_row(
            what, *(f"{x:.3f}" for x in (median(all_ms), quantiles(all_ms, n=100)[98], max(all_ms)))
        )
    out = Console()
    out.print(table)
    out.print(f"{programs:,} programs over {replicas} replicas, {asked:,} of each kind; ", end="")
    out.print(f"{bytes_each:,.0f} bytes a program and its last turn")


if __name__ == "__main__":
    typer.run(main)
