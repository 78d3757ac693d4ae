"""Load or recompute? For each prompt that a tier holds, and by what is measured only.

The three ways, which `CostModel.ways` prices:

    load        all that DRAM and disk hold of the prompt
    partial     the DRAM stretch; what only the disk has is computed
    recompute   nothing is loaded

A connector that can do so asks the judge what to offer vLLM (`tiers.SelectiveLoader`), with `offered`
to say where the tokens lie.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from continuum_lmcache.reload.cost_model import CostModel
from continuum_lmcache.reload.rate_calibration import CalibratedCosts
from continuum_lmcache.reload.tier_store import TierHit
from continuum_lmcache.types import Residency, TurnId

LEAST_SAMPLES = 3  # of each rate that a decision hangs on
TRIAL_SHARE = 0.02  # of the time that declined loads take to compute


class LoadReason(Enum):
    """How a load was decided. Low cardinality: these are metric labels."""

    LOAD = "load"
    PARTIAL = "partial"
    RECOMPUTE = "recompute"
    UNMEASURED = "unmeasured"  # loaded, since a rate it hangs on is only assumed
    TRIAL = "trial"  # loaded although declined, to see whether the tier is still so slow


@dataclass(frozen=True, slots=True)
class LoadChoice:
    """What to load of one prompt."""

    decision: LoadReason
    tokens: int  # after those that the GPU has
    chosen_s: float = 0.0  # what all that is predicted to wait for it, the rest of the prompt included
    excess_s: float = 0.0  # what loading everything is predicted to cost more


@dataclass(frozen=True, slots=True)
class Contention:
    """Who else is there, where loads go on beside the steps."""

    turns: int  # waiting and running
    kv_tokens: int  # of the GPU's KV cache, which all share


NOBODY = Contention(0, 1)


def nobody() -> Contention:
    """Where a step waits for its loads: the way that is fastest for one turn is the cheapest for all."""
    return NOBODY


def verdict(costs: CostModel, where: Residency, others: Contention = NOBODY) -> LoadChoice:
    """The cheapest way, if every rate it is weighed by was measured; else everything is loaded.

    What counts is the time of all turns. This one waits for its load and its prefill; each of the
    `others` waits for the prefill, and for its share of the memory that this one holds meanwhile.

    A guess must not turn a cache off, nor one freak load: without a profile nothing is declined before
    LEAST_SAMPLES prefills and as many loads from each tier that has something of the prompt.
    """
    everything = where.dram_tokens + where.ssd_tokens
    if not is_measured(costs, where):
        return LoadChoice(LoadReason.UNMEASURED, everything)
    share = where.total_tokens / others.kv_tokens
    ways = {
        way.loaded_tokens: way.total_s + others.turns * (way.compute_s + share * way.total_s)
        for way in costs.ways(where)
    }
    best = min(ways, key=ways.__getitem__)
    if best == everything:
        return LoadChoice(LoadReason.LOAD, everything, ways[best])
    decision = LoadReason.PARTIAL if best else LoadReason.RECOMPUTE
    return LoadChoice(decision, best, ways[best], ways[everything] - ways[best])


def is_measured(costs: CostModel, where: Residency) -> bool:
    """Whether the prefill, and each tier that holds something of the prompt, has enough samples."""
    tiers = ((where.dram_tokens, costs.dram), (where.ssd_tokens, costs.ssd))
    rates = [costs.prefill.samples, *(rate.samples for tokens, rate in tiers if tokens)]
    return min(rates) >= LEAST_SAMPLES


def offered(held: TierHit, gpu_tokens: int, found_tokens: int, total_tokens: int) -> Residency:
    """Where `found_tokens` after the GPU's `gpu_tokens` lie, by what the store said it holds.

    What the connector found and the store does not know of came in just now: it is in DRAM.
    """
    end = gpu_tokens + found_tokens
    on_disk = max(0, min(held.dram_tokens + held.ssd_tokens, end) - max(held.dram_tokens, gpu_tokens))
    return Residency(gpu_tokens, found_tokens - on_disk, on_disk, total_tokens)


class LoadPolicy:
    """Decides for waiting turns, and counts what was decided for those that were placed.

    A tier whose loads are all declined is never timed again. So a declined load is made all the same
    as soon as what it is predicted to cost too much is TRIAL_SHARE of what was computed instead: as a
    rule trials make prompts that are declined 2 % slower, and a tier that is fast again is found out.
    """

    def __init__(
        self, rates: CalibratedCosts, others: Callable[[], Contention] = nobody, weighs: bool = True
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.is_asked = False  # whether a connector loads as this says
        self.rates, self._others, self._weighs = rates, others, weighs
        self._open: dict[TurnId, LoadChoice] = {}
        self._failed: set[TurnId] = set()
        self._declined: set[TurnId] = set()  # of what a tier had, not all was loaded: computing is cheaper
        self._credit_s = 0.0

    def tokens(self, turn: TurnId, where: Residency) -> int:
        """How many tokens to load (tiers.LoadRule)."""
        if turn in self._failed:
            return 0
        if not self._weighs:
            return where.dram_tokens + where.ssd_tokens
        found = verdict(self.rates.costs, where, self._others())
        if 0.0 < found.excess_s <= self._credit_s:
            everything = where.dram_tokens + where.ssd_tokens
            found = LoadChoice(LoadReason.TRIAL, everything, found.chosen_s, found.excess_s)
        self._open[turn] = found
        return found.tokens

    def placed(self, turn: TurnId) -> None:
        """vLLM took the last answer: it counts."""
        found = self._open.pop(turn, None)
        if found is None:
            return
        self.counts[found.decision.value] += 1
        if found.decision in (LoadReason.PARTIAL, LoadReason.RECOMPUTE):
            self._declined.add(turn)
        if found.decision is LoadReason.TRIAL:
            self._credit_s -= found.excess_s
        elif found.excess_s:
            self._credit_s += TRIAL_SHARE * found.chosen_s

    def has_declined(self, turn: TurnId) -> bool:
        """Whether a tier had more of the turn's prompt than pays to load."""
        return turn in self._declined

    def failed(self, turn: TurnId) -> None:
        """The turn's load failed: it is not tried again."""
        self._failed.add(turn)

    def gone(self, turn: TurnId) -> None:
        """The turn ended, perhaps without having been placed."""
        self._open.pop(turn, None)
        self._failed.discard(turn)
        self._declined.discard(turn)
