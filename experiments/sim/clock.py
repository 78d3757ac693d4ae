"""The clock and the event queue of a simulated engine; the only module that gives vLLM the clock."""

from __future__ import annotations

import heapq
import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType

TIMED_MODULES = (
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.core.kv_cache_metrics",
    "vllm.v1.request",
    "vllm.v1.engine",
    "connectors.fake.connector",
)
"""Modules on a simulated engine's path that say `time.something()`; a test looks for new ones."""


@dataclass(slots=True)
class VirtualClock:
    """Seconds since the start of a run. Stands in for the module `time` where vLLM reads it."""

    now_s: float = 0.0

    def advance_to(self, then_s: float) -> None:
        """Let time pass until `then_s`. Raises ValueError if that is in the past."""
        if then_s < self.now_s:
            raise ValueError(f"time cannot go back from {self.now_s} to {then_s} s")
        self.now_s = then_s

    def time(self) -> float:
        return self.now_s

    monotonic = perf_counter = time

    def monotonic_ns(self) -> int:
        return round(self.now_s * 1e9)


@dataclass(slots=True)
class Timetable:
    """Future actions by time. Equal times run in the order in which they were added."""

    entries: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)  # a heap
    entered: int = 0

    def at(self, then_s: float, action: Callable[[], None]) -> None:
        """Do `action` at `then_s`."""
        self.entered += 1
        heapq.heappush(self.entries, (then_s, self.entered, action))

    def bring_forward(self, by_s: float) -> None:
        """Everything entered is due so much sooner."""
        self.entries = [(then_s - by_s, number, action) for then_s, number, action in self.entries]

    def run_due(self, now_s: float) -> None:
        """Do all that is due, oldest first."""
        while self.entries and self.entries[0][0] <= now_s:
            heapq.heappop(self.entries)[2]()

    @property
    def next_s(self) -> float:
        """When the next entry is due; infinite if there is none."""
        return self.entries[0][0] if self.entries else math.inf


@contextmanager
def virtual_time(clock: VirtualClock, more: Sequence[ModuleType] = ()) -> Iterator[VirtualClock]:
    """Within the block, TIMED_MODULES and `more` read `clock`; afterwards always real time."""
    modules = [*map(importlib.import_module, TIMED_MODULES), *more]
    real = [module.time for module in modules]
    for module in modules:
        vars(module)["time"] = clock
    try:
        yield clock
    finally:
        for module, time in zip(modules, real, strict=True):
            vars(module)["time"] = time
