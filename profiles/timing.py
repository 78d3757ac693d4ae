"""Repeated timings on a machine that others may use meanwhile: in turns, on two clocks, until time is up."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Any, TypeVar

Clock = Callable[[], float]
P = TypeVar("P", bound=Hashable)


class Which(StrEnum):
    """The clock of a profile's times."""

    WALL = "wall"  # a request's wait
    CPU = "cpu"  # what this process computed: the wall clock of a CPU machine that no other process uses


@dataclass(frozen=True, slots=True)
class Sample:
    """One run, in seconds."""

    wall_s: float
    cpu_s: float  # of all threads of this process

    def by(self, which: Which) -> float:
        return self.wall_s if which is Which.WALL else self.cpu_s


@dataclass(frozen=True, slots=True)
class Timer:
    """Times work. The clocks are arguments, so that a test can turn them."""

    wall: Clock = time.perf_counter
    cpu: Clock = time.process_time

    def time(self, work: Callable[[], object]) -> Sample:
        wall_s, cpu_s = self.wall(), self.cpu()
        work()
        return Sample(self.wall() - wall_s, self.cpu() - cpu_s)


class Budget:
    """How long measuring may still take, and how often each point is to be repeated."""

    def __init__(self, seconds: float, repetitions: int, clock: Clock = time.monotonic) -> None:
        self.repetitions = repetitions
        self._clock, self._end_s = clock, clock() + seconds

    @property
    def left_s(self) -> float:
        return self._end_s - self._clock()

    def share(self, of: float) -> Budget:
        """A budget of this share, 0 to 1, of the rest."""
        return Budget(max(0.0, self.left_s) * of, self.repetitions, self._clock)


def in_turns(
    points: Iterable[P], run: Callable[[P], Sample], budget: Budget, tick: Callable[[], None]
) -> dict[P, list[Sample]]:
    """`run` every point once and forget it (warm-up), then each of them `repetitions` times, in turns.

    In turns, so that somebody else's burst meets every point alike. When the budget is spent it stops;
    a point that was never reached is missing.
    """
    taken: dict[P, list[Sample]] = {}
    points = list(points)
    for turn in range(budget.repetitions + 1):
        for point in points:
            if budget.left_s <= 0:
                break
            sample = run(point)
            if turn:
                taken.setdefault(point, []).append(sample)
            tick()
    return taken


def summary(samples: list[Sample], which: Which) -> dict[str, Any]:
    """Median, least and most seconds by the profile's clock, and the wall clock's median beside it."""
    seconds = [sample.by(which) for sample in samples]
    return {
        "median_s": rounded(median(seconds)),
        "min_s": rounded(min(seconds)),
        "max_s": rounded(max(seconds)),
        "wall_median_s": rounded(median(sample.wall_s for sample in samples)),
        "n": len(samples),
    }


def rounded(value: float) -> float:
    """To five digits, as a profile is read by people."""
    return float(f"{value:.5g}")
