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
STAYS_ROOM = 1.25  # times the prefill: a tier that counts as room does until a load takes so long


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
        self.queue_delay_s = 0.0  # T of eq. 2: the mean of these; 0 before the first (the paper's start)
        self.rates = CalibratedCosts(costs)
        self.survival = TierSurvival(capacity_tokens or {})
        self._room: frozenset[Tier] = frozenset()  # the tiers that count as room

    def observe_queue_delay(self, delay_s: float) -> None:
        """A turn whose program's KV had been evicted left the waiting queue: it came back without a pin, and
        had to reload or recompute something. Other turns lost nothing and do not count in T."""
        self._delays_s.append(delay_s)
        self.queue_delay_s = sum(self._delays_s) / len(self._delays_s)

    def cheap_tier_tokens(self) -> int:
        """How many tokens the largest tier can hold from which a load takes less time than computing, by the
        rates so far. Rates of loads vary, so a tier that was room stays it up to STAYS_ROOM."""
        where = {Tier.DRAM: Residency(0, TYPICAL_TOKENS, 0, TYPICAL_TOKENS)}
        where[Tier.SSD] = Residency(0, 0, TYPICAL_TOKENS, TYPICAL_TOKENS)
        costs, tiers = self.rates.costs, self.survival.capacity_tokens
        compute_s = costs.prefill_s(TYPICAL_TOKENS)
        loads_s = {tier: costs.load_options(where[tier])[-1].total_s for tier in tiers}
        limits_s = {tier: compute_s * (STAYS_ROOM if tier in self._room else 1.0) for tier in tiers}
        self._room = frozenset(tier for tier in tiers if loads_s[tier] < limits_s[tier])
        return max((tiers[tier] for tier in self._room), default=0)
