"""Who is away with KV on a disk, and when that should be on its way to DRAM."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from continuum_lmcache.distributions import Distribution
from continuum_lmcache.types import ProgramId

# chosen, not tuned: in the lab 0.1 to 0.5 and 1 to 3 give the same (experiments/LOG.md, 2026-11-21)
EARLY_SHARE = 0.25  # of the returns come before the one that is prepared for
LEAD = 1.5  # times what the disk takes to read the context: others read from it too
LOOK_AGAIN_S = 1.0  # after the GPU was seen to have its copy still


def start_s(now_s: float, gaps: Distribution, read_s: float) -> float:
    """When to begin to read a context that takes the disk `read_s`, for a tool that was called now."""
    return now_s + max(0.0, gaps.within_s(EARLY_SHARE) - LEAD * read_s)


@dataclass(frozen=True, slots=True, order=True)
class Plan:
    """One paused program's context, to be fetched from `due_s` on."""

    due_s: float
    program: ProgramId = field(compare=False)
    paused_s: float = field(compare=False)  # which pause: it may have come back and left again
    on_gpu: Callable[[], bool] = field(compare=False)  # whether the GPU has its copy still
    fetch: Callable[[], None] = field(compare=False)


class Plans:
    """All of them, soonest first."""

    def __init__(self) -> None:
        self._heap: list[Plan] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, plan: Plan) -> None:
        heapq.heappush(self._heap, plan)

    def next_s(self) -> float | None:
        """When the first of them is due."""
        return self._heap[0].due_s if self._heap else None

    def due(self, now_s: float) -> list[Plan]:
        """Those whose time has come; they are no longer here."""
        found = []
        while self._heap and self._heap[0].due_s <= now_s:
            found.append(heapq.heappop(self._heap))
        return found
