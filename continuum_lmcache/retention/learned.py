"""What turns have shown so far: tool gaps, rates of loads and prefills, what tiers keep, queueing delays."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from continuum_lmcache.reload.cost_model import UNMEASURED, CostModel
from continuum_lmcache.reload.rate_calibration import CalibratedCosts, TierSurvival
from continuum_lmcache.tools.durations import ToolDurations
from continuum_lmcache.types import Residency, Tier

QUEUE_WINDOW = 100  # number of delays in T: the paper's K, minutes under load, so that T follows it
TYPICAL_TOKENS = 20_000  # at this context, reloading and computing are compared


class Learned:
    """One engine's observations. No clock: times are arguments."""

    def __init__(
        self,
        costs: CostModel = UNMEASURED,
        gaps: ToolDurations | None = None,
        capacity_tokens: Mapping[Tier, int] | None = None,
    ) -> None:
        self.gaps = gaps if gaps is not None else ToolDurations()
        self._delays_s: deque[float] = deque(maxlen=QUEUE_WINDOW)
        self.rates = CalibratedCosts(costs)
        self.survival = TierSurvival(capacity_tokens or {})

    def observe_queue_delay(self, delay_s: float) -> None:
        """A turn whose program's KV had been evicted left the waiting queue: it came back without a pin, and
        had to reload or recompute something. Other turns lost nothing and do not count in T."""
        self._delays_s.append(delay_s)

    @property
    def queue_delay_s(self) -> float:
        """T of eq. 2: mean delay of the last evicted turns; 0 before the first (the paper's start)."""
        return sum(self._delays_s) / len(self._delays_s) if self._delays_s else 0.0

    def cheap_tier_tokens(self) -> int:
        """How many tokens the largest tier can hold from which a reload takes less time than computing."""
        where = {Tier.DRAM: Residency(0, TYPICAL_TOKENS, 0, TYPICAL_TOKENS)}
        where[Tier.SSD] = Residency(0, 0, TYPICAL_TOKENS, TYPICAL_TOKENS)
        expensive_s = self.rates.costs.prefill_s(TYPICAL_TOKENS)
        tiers = self.survival.capacity_tokens.items()
        return max((n for t, n in tiers if self.rates.costs.reload_s(where[t]) < expensive_s), default=0)
