"""Decides for how long a finished turn's KV stays, from the tool gaps, queues and loads so far."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from continuum_lmcache.config import ContinuumConfig
from continuum_lmcache.reload.cost_model import UNMEASURED, CostModel
from continuum_lmcache.reload.rate_calibration import CalibratedCosts, TierSurvival
from continuum_lmcache.retention.policies import policy_named
from continuum_lmcache.retention.ttl_solver import CONTENDED_PRICE, IDLE_PRICE
from continuum_lmcache.tools.call_parser import likely_slowest
from continuum_lmcache.tools.durations import ToolDurations
from continuum_lmcache.types import (
    NO_CALL,
    EngineLoad,
    FinishedTurn,
    QueueEntry,
    Residency,
    Retention,
    Tier,
    ToolKey,
)

QUEUE_WINDOW = 100  # number of delays in T: the paper's K, minutes under load, so that T follows it
TYPICAL_TOKENS = 20_000  # at this context, reloading and computing are compared
CHEAP_SHARE = 0.5  # of the prefill: a reload below this is cheap
STAYS_ROOM = 1.25  # times the prefill: a tier that counts as room does until a load takes so long
EXPECTED_GAPS = 4.0  # times its mean gap: after that a program is no longer expected back
LEAST_EXPECTED_S = 20.0  # at 10, the longest gap in the field's measure, programs lost their room
MOST = 0.5  # of the programs that made a call
COLD_GAP_S = 1.0  # without a known gap: Exp(1)'s mean, as in the paper's cold start


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is expected of a program in a call of a tool."""

    is_usually_last: bool  # most programs that made the call did not return: an answer, `submit`
    keeps_no_memory: bool  # and those that do return take long
    expected_s: float  # for how long it is still expected back
    gap_s: float  # the mean of its gaps that ended, however few; 0 while none is known


class RetentionAdvisor:
    """One engine's statistics, and the policy that uses them. No clock: times are arguments."""

    def __init__(
        self,
        config: ContinuumConfig,
        costs: CostModel = UNMEASURED,
        gaps: ToolDurations | None = None,
        capacity_tokens: Mapping[Tier, int] | None = None,
    ) -> None:
        self._policy = policy_named(config.policy)
        self.features = self._policy.features
        self.config = replace(config, admission=config.admission and self.features.admission)
        self.gaps = gaps if gaps is not None else ToolDurations()
        self._delays_s: deque[float] = deque(maxlen=QUEUE_WINDOW)
        self.rates = CalibratedCosts(costs)
        self.survival = TierSurvival(capacity_tokens or {})
        self._room: frozenset[Tier] = frozenset()  # the tiers that count as room

    def is_priced(self, context_tokens: int, reload_s: float) -> bool:
        """Whether a pin of this context costs only while a turn waits for memory. Where a tier
        returns it cheaply, a pin saves little: then each second costs one, as in the paper."""
        expensive_s = CHEAP_SHARE * self.rates.costs.prefill_s(context_tokens)
        return self.features.priced_pins and reload_s >= expensive_s

    def observe_queue_delay(self, delay_s: float) -> None:
        """A turn whose program's KV had been evicted left the waiting queue: it came back without a pin, and
        had to reload or recompute something. Other turns lost nothing and do not count in T."""
        self._delays_s.append(delay_s)

    @property
    def queue_delay_s(self) -> float:
        """T of eq. 2: mean delay of the last evicted turns; 0 before the first (the paper's start)."""
        return sum(self._delays_s) / len(self._delays_s) if self._delays_s else 0.0

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

    def outlook(self, tool: ToolKey, tenant: str = "") -> Outlook:
        """What the observed gaps say of a program in a call of `tool`.

        Of gaps that end after an exponential time or, in a share q of cases, never, one that has lasted
        ln((1 - q) / q) mean gaps is as likely to end as not: so long the program is expected back.
        No memory is kept if most programs end with the call, or if it is an answer and most people take
        longer than LEAST_EXPECTED_S to reply. A slow tool is no such case: where it returns the program has
        many turns left (LOG.md, 2026-11-26).
        """
        own = self.gaps.of(tenant)
        lost = own.lost_share(tool)
        late = own.longer_share(tool, LEAST_EXPECTED_S) if tool == NO_CALL else lost
        evicts, expected_s = self.features.evict_ended_programs, 0.0
        if not (is_late := evicts and late > MOST):
            gaps = min(EXPECTED_GAPS, math.log((1.0 - lost) / lost)) if lost > 0.0 else EXPECTED_GAPS
            expected_s = max(LEAST_EXPECTED_S, gaps * (own.distribution(tool).mean_s or COLD_GAP_S))
        gap_s = own.most_specific(tool).mean_s or 0.0
        return Outlook(evicts and lost > MOST, is_late, expected_s, gap_s)

    def order(self, entry: QueueEntry) -> tuple[float, ...]:
        """A waiting turn's place: smallest first."""
        return self._policy.order(entry)

    def retain(self, turn: FinishedTurn, load: EngineLoad, outlook: Outlook | None = None) -> Retention:
        """For how long this turn's KV should stay, never beyond max_ttl_s. `outlook`: of its tool, if it is
        known."""
        reload_s = self.rates.costs.reload_s(turn.residency, self.survival.chances())
        if (outlook or self.outlook(turn.tool, turn.tenant)).keeps_no_memory:
            return Retention(0.0, self.config.policy, "returns-late", reload_s=reload_s)
        if not self.features.evict_ended_programs:
            turn = replace(turn, repeated_share=1.0)  # as in the paper
        is_idle = self.is_priced(turn.context_tokens, reload_s) and not load.is_memory_short
        load = replace(
            load,
            queue_delay_s=self.queue_delay_s,
            reload_s=reload_s,
            price=IDLE_PRICE if is_idle else CONTENDED_PRICE,
        )
        keep = self._policy.retain(turn, self.gaps.of(turn.tenant), self.rates.costs, load, self.config)
        return replace(keep, ttl_s=min(keep.ttl_s, self.config.max_ttl_s), reload_s=reload_s)

    def slowest(self, calls: Sequence[ToolKey], tenant: str = "") -> ToolKey:
        """Of a turn's parallel calls the slowest by the tenant's own mean gaps, or by its name while none is
        known.

        A call counts with its most specific level that has observations: which call is slower is a weaker
        question than how long it takes. Gaps are long-tailed, so the largest mean is close to the mean of
        the largest.
        """
        if len(calls) < 2:
            return calls[0] if calls else ()
        own = self.gaps.of(tenant)
        slowest = max(calls, key=lambda call: own.most_specific(call).mean_s or 0.0)
        return slowest if own.exact(slowest).n else likely_slowest(calls)
