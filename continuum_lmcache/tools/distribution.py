"""The distribution of a tool's gaps, as the policies use it."""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class DurationDistribution:
    """P(gap <= ttl_s) for one kind of gap, and its observations."""

    level: str  # "tool:2" a shell's program, "tool:1" tool, "all", "cold"
    samples_s: tuple[float, ...]  # gaps that ended, ascending
    cdf: tuple[float, ...]  # P(gap <= samples_s[i])
    n: int  # observations, those that never ended included

    def probability(self, ttl_s: float) -> float:
        """P(gap <= ttl_s), 0 to 1; while cold that of Exp(1), by the paper."""
        if self.level == "cold":
            return -math.expm1(-max(ttl_s, 0.0))
        at = bisect_right(self.samples_s, ttl_s)
        return self.cdf[at - 1] if at else 0.0

    def after(self, elapsed_s: float) -> DurationDistribution:
        """The rest of a gap that has lasted `elapsed_s` already. Exp(1), while cold, has no memory."""
        if self.level == "cold" or elapsed_s <= 0.0:
            return self
        at, over = bisect_right(self.samples_s, elapsed_s), self.probability(elapsed_s)
        left_s = tuple(gap_s - elapsed_s for gap_s in self.samples_s[at:])
        return replace(self, samples_s=left_s, cdf=tuple((p - over) / (1.0 - over) for p in self.cdf[at:]))

    @property
    def mean_s(self) -> float | None:
        """Mean of the gaps that ended; None if none did."""
        return sum(self.samples_s) / len(self.samples_s) if self.samples_s else None


@functools.lru_cache(maxsize=2)
def equal_steps(ended: int, observed: int) -> tuple[float, ...]:
    """P(gap <= each of the gaps that ended), ascending: those that never ended are longer than all. Of a full
    window it is often the same."""
    return tuple([number / observed for number in range(1, ended + 1)])
