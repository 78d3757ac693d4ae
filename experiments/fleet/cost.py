"""What a turn and a report cost the fleet's state, and its memory.    python -m experiments.fleet.cost

CPU time of one core, the median of batches; memory by tracemalloc, with the programs' names.
"""

from __future__ import annotations

import secrets
import tracemalloc
from collections.abc import Callable, Iterable
from statistics import median
from time import process_time

import typer

from continuum_lmcache.fleet.fleet import PROGRAMS_A_REPLICA, Fleet, KnownProgram, ReplicaId, ReplicaReport
from continuum_lmcache.types import MOST_PROGRAMS, ProgramId
from experiments.tables import markdown

REPLICAS = (4, 64, 1000)
BATCH, BATCHES = 1000, 20


def filled(replicas: int, programs: int) -> tuple[Fleet, list[ReplicaId], list[ProgramId]]:
    """A fleet with that many programs, whose first turns have ended."""
    fleet, names = Fleet(), [ReplicaId(secrets.token_hex(4)) for _ in range(replicas)]
    known = [ProgramId(secrets.token_hex(16)) for _ in range(programs)]
    for at, name in enumerate(names):
        fleet.on_report(0.0, ReplicaReport(name), [KnownProgram(each) for each in known[at::replicas]])
    return fleet, names, known


def each_us(do: Callable[[int], object]) -> float:
    """Microseconds of one call with a number from 0 on."""
    found = []
    for batch in range(BATCHES):
        begin_s = process_time()
        for number in range(batch * BATCH, (batch + 1) * BATCH):
            do(number)
        found.append((process_time() - begin_s) / BATCH * 1e6)
    return median(found)


def costs_us(replicas: int, programs: int) -> Iterable[float]:
    """Of a home turn, of a new program, of a report with one program that has changed."""
    fleet, names, known = filled(replicas, programs)
    step = len(known) // (BATCH * BATCHES) or 1
    yield each_us(lambda n: fleet.on_arrival(1.0, known[n * step % len(known)]))
    fresh = [ProgramId(secrets.token_hex(16)) for _ in range(BATCH * BATCHES)]
    yield each_us(lambda n: fleet.on_arrival(1.0, fresh[n]))
    yield each_us(
        lambda n: fleet.on_report(1.0, ReplicaReport(names[n % replicas]), [KnownProgram(fresh[n], 1)])
    )


def memory_bytes(replicas: int, programs: int) -> int:
    """Of a fleet that knows that many programs."""
    tracemalloc.start()
    kept = filled(replicas, programs)
    found, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(kept[0].programs) == programs
    return found


def main(programs: int = 1_000_000) -> None:
    """Measure, and print a table in Markdown. Fewer replicas know fewer programs."""
    lines = [["replicas", "programs", "home turn, us", "new program, us", "report, us"]]
    for replicas in REPLICAS:
        most = min(programs, max(MOST_PROGRAMS, replicas * PROGRAMS_A_REPLICA))
        lines.append([str(replicas), f"{most:,}", *(f"{us:.1f}" for us in costs_us(replicas, most))])
    print(markdown(lines))
    print(f"\n{programs:,} programs: {memory_bytes(REPLICAS[-1], programs) / 1e6:.0f} MB")


if __name__ == "__main__":
    typer.run(main)
