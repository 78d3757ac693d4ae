"""What real loads and returns show about the tiers: how fast they are now, and how much KV they keep."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from continuum_lmcache.reload.cost_model import SECTIONS, CostModel
from continuum_lmcache.reload.tier_store import KVTransfer
from continuum_lmcache.types import Residency, Tier

LEAST_GAIN = 0.1  # a lasting change is learned within 2 % (of its logarithm) after 40 loads
PRIOR_LOADS = 5  # the initial weight of a measured rate: the first load moves it by 1/5 of its error
GUESS_LOADS = 2  # the initial weight of an assumed one
AGREEING, FAR_OFF = 3, math.log(2.0)  # consecutive loads, and the log of a factor: a change
MOST_DRIFT = math.log(1e6)  # of a factor; no tier is further from its profile
MOST_OFF = math.log(10.0)  # of a factor; a load further off counts as one that is this far off
LEAST_READ_SHARE = 0.1  # of a disk load's seconds, since the copy cannot have taken all of them
KEPT_DECAY = 0.98  # each return: half of the weight is that of the latest 34


@dataclass(frozen=True, slots=True)
class RateDrift:
    """How much slower a tier is than its profile: rate = profile * exp(-log_slower)."""

    log_slower: float = 0.0
    loads: int = 0
    prior: int = PRIOR_LOADS  # the profile's rate weighs as many loads at first
    latest: tuple[float, ...] = ()  # the last loads' log_slower, AGREEING at most

    def updated(self, log_slower: float) -> RateDrift:
        """After one more load, as robust as a mean can be: its error is limited to MOST_OFF.

        But AGREEING consecutive loads that are off by more than FAR_OFF, all to one side, are not noise:
        the tier has another rate now, and theirs is used.
        """
        latest = (*self.latest, log_slower)[-AGREEING:]
        errors = [one - self.log_slower for one in latest]
        if len(latest) == AGREEING and (min(errors) > FAR_OFF or max(errors) < -FAR_OFF):
            found = median(latest)
        else:
            error = max(-MOST_OFF, min(MOST_OFF, errors[-1]))
            found = self.log_slower + max(LEAST_GAIN, 1.0 / (self.loads + self.prior)) * error
        return RateDrift(max(-MOST_DRIFT, min(MOST_DRIFT, found)), self.loads + 1, self.prior, latest)


class CalibratedCosts:
    """Costs whose rates follow the loads and the steps: the profile times one factor each.

    The factor is a geometric mean, so twice as slow and twice as fast weigh the same. Both parts of a
    TransferRate move together: loads of one size cannot separate them, and there the prediction is right.
    """

    def __init__(self, costs: CostModel) -> None:
        self._profile = self.costs = costs
        priors = {name: PRIOR_LOADS if samples else GUESS_LOADS for name, samples in self.samples.items()}
        self.drifts = {name: RateDrift(prior=prior) for name, prior in priors.items()}

    def observe(self, moved: KVTransfer) -> None:
        name, is_plausible = moved.tier.value, moved.size_bytes > 0 and 0.0 < moved.duration_s < math.inf
        if is_plausible and name in self.drifts:
            predicted_s = getattr(self._profile, name).seconds(moved.size_bytes)
            self._learn(name, math.log(self._own_s(moved)) - math.log(predicted_s))

    def observe_prefill(self, took_s: float, predicted_s: float) -> None:
        """Learn from one step: its seconds, and those of its tokens by `costs`."""
        if 0.0 < took_s < math.inf and 0.0 < predicted_s < math.inf:
            before = self.drifts["prefill"].log_slower
            self._learn("prefill", before + math.log(took_s) - math.log(predicted_s))

    def _learn(self, name: str, log_slower: float) -> None:
        drift = self.drifts[name] = self.drifts[name].updated(log_slower)
        profile: Any = getattr(self._profile, name)
        slower = profile.slower(math.exp(drift.log_slower), profile.samples + drift.loads)
        self.costs = replace(self.costs, **{name: slower})

    @property
    def samples(self) -> dict[str, int]:
        """How many measurements each rate has; 0: it is assumed."""
        return {name: getattr(self.costs, name).samples for name in SECTIONS}

    def _own_s(self, moved: KVTransfer) -> float:
        """The tier's own seconds: a disk load includes the copy to the GPU, which the cost model adds."""
        if moved.tier is Tier.DRAM:
            return moved.duration_s
        copy_s = self.costs.dram.seconds(moved.size_bytes)
        return max(moved.duration_s - copy_s, moved.duration_s * LEAST_READ_SHARE)


ONE_KEPT = (1.0, 1.0)  # at first, as if one return had found all


class TierSurvival:
    """The probability that a tier still holds a context when the GPU has lost it.

    It is the share that was still there, on average, when programs came back whose KV the GPU had lost. A
    model of an LRU by the rate of its stores has a chance of nearly 1 for a DRAM that is smaller than the
    GPU's cache, which keeps what was used last, as the GPU does (LOG.md, 2026-11-27).
    """

    def __init__(self, capacity_tokens: Mapping[Tier, int]) -> None:
        self.capacity_tokens: dict[Tier, int] = {}
        self._kept: dict[Tier, tuple[float, float]] = {}  # sums over returns: the share that was kept, and 1
        self.resize(capacity_tokens)

    def resize(self, capacity_tokens: Mapping[Tier, int]) -> None:
        """The tiers hold so many tokens now. One may be new, or gone."""
        before, self.capacity_tokens = self.capacity_tokens, dict(capacity_tokens)
        same = {tier for tier, tokens in capacity_tokens.items() if before.get(tier) == tokens}
        self._kept = {tier: self._kept[tier] if tier in same else ONE_KEPT for tier in capacity_tokens}

    def on_return(self, left: Residency, found: Residency, context_tokens: int) -> None:
        """A program is back, and the GPU has lost a part of its context of `context_tokens`.

        `left`: where the context was below the GPU when its last turn ended. `found`: where its prompt
        comes from now. What is in DRAM is on the disk too, so a disk has kept what DRAM has.
        """
        parts = {Tier.DRAM: (left.dram_tokens, found.dram_tokens)}
        parts[Tier.SSD] = (left.dram_tokens + left.ssd_tokens, found.dram_tokens + found.ssd_tokens)
        for tier, (left_tokens, found_tokens) in parts.items():
            lost_tokens = min(left_tokens, context_tokens) - found.gpu_tokens
            if tier in self._kept and lost_tokens > 0:
                kept, returns = self._kept[tier]
                share = min(1.0, found_tokens / lost_tokens)
                self._kept[tier] = (kept * KEPT_DECAY + share, returns * KEPT_DECAY + 1.0)

    def chances(self) -> dict[Tier, float]:
        """By tier, 0 to 1, for CostModel.reload_s."""
        return {tier: kept / returns for tier, (kept, returns) in self._kept.items()}
