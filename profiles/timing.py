"""Repeated timings on a machine that others may use meanwhile: in turns, until time is up."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

P = TypeVar("P", bound=Hashable)
T = TypeVar("T")


def timed(work: Callable[..., T], *args: object) -> tuple[float, T]:
    """The seconds that it took, and what it returned."""
    began_s = time.perf_counter()
    found = work(*args)
    return time.perf_counter() - began_s, found


class Budget:
    """How long measuring may still take, and how often each point is to be repeated."""

    def __init__(self, seconds: float, repetitions: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.repetitions = repetitions
        self._clock, self._end_s = clock, clock() + seconds

    @property
    def left_s(self) -> float:
        return self._end_s - self._clock()

    def share(self, of: float) -> Budget:
        """A budget of this share, 0 to 1, of the rest."""
        return Budget(max(0.0, self.left_s) * of, self.repetitions, self._clock)


def in_turns(
    points: Iterable[P], run: Callable[[P], float], budget: Budget, tick: Callable[[], None]
) -> dict[P, list[float]]:
    """`run` every point once and forget it (warm-up), then each of them `repetitions` times, in turns.

    In turns, so that somebody else's burst meets every point alike. When the budget is spent it stops;
    a point that was never reached is missing.
    """
    taken: dict[P, list[float]] = {}
    points = list(points)
    for turn in range(budget.repetitions + 1):
        for point in points:
            if budget.left_s <= 0:
                break
            took_s = run(point)
            if turn:
                taken.setdefault(point, []).append(took_s)
            tick()
    return taken


def time_moves(
    chunk_counts: Iterable[int],
    most: int,
    move: Callable[[str, list[int]], float],
    budget: Budget,
    tick: Callable[[], None],
) -> dict[tuple[str, int], list[float]]:
    """Seconds of loads and stores by number of chunks. `move`: ("load" | "store", which of `most` chunks),
    other ones each time."""
    draw = random.Random(0)
    points = [(way, n) for n in chunk_counts if n <= most for way in ("load", "store")]
    return in_turns(points, lambda at: move(at[0], draw.sample(range(most), at[1])), budget, tick)


def rounded(value: float) -> float:
    """To five digits, as a profile is read by people."""
    return float(f"{value:.5g}")
