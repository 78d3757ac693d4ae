"""What real loads show about the tiers: how fast they are now, and how long they keep KV.

Both classes observe every KVTransfer, and report their number of samples. Times are arguments.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

from continuum_lmcache.reload.cost_model import NO_STALL, CostModel, PrefillCurve, TransferRate
from continuum_lmcache.reload.tier_store import KVTransfer
from continuum_lmcache.types import Tier

LEAST_GAIN = 0.1  # a lasting change is learned within 2 % (of its logarithm) after 40 loads
PRIOR_LOADS = 5  # the initial weight of a measured rate: the first load moves it by 1/5 of its error
GUESS_LOADS = 2  # the initial weight of an assumed one
NO_PRIOR = 1  # the first sample replaces the rate
AGREEING, FAR_OFF = 3, 2.0  # consecutive loads, and a factor: a change, not noise
MOST_DRIFT = 1e6  # a factor; no tier is further from its profile
MOST_OFF = 10.0  # a factor; a load further off counts as one that is this far off
LEAST_READ_SHARE = 0.1  # of a disk load's seconds, since the copy cannot have taken all of them
SETTLING_S = 300.0  # half of a fill rate's weight is younger than ln 2 times this
LEAST_SEEN_S = 30.0  # a shorter burst is spread over this time: it does not predict the next minute


@dataclass(frozen=True, slots=True)
class RateDrift:
    """How much slower a tier is than its profile: 1/e to the `log_slower`-th of the rate is left."""

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
        far = math.log(FAR_OFF)
        if len(latest) == AGREEING and (min(errors) > far or max(errors) < -far):
            found = median(latest)
        else:
            cut = math.log(MOST_OFF)
            error = max(-cut, min(cut, errors[-1]))
            found = self.log_slower + max(LEAST_GAIN, 1.0 / (self.loads + self.prior)) * error
        most = math.log(MOST_DRIFT)
        return RateDrift(max(-most, min(most, found)), self.loads + 1, self.prior, latest)

    def of(self, rate: TransferRate) -> TransferRate:
        """The profile's rate, corrected. Its samples are the profile's and the loads since."""
        slower = math.exp(self.log_slower)
        return TransferRate(rate.bytes_per_s / slower, rate.fixed_s * slower, rate.samples + self.loads)

    def of_curve(self, curve: PrefillCurve) -> PrefillCurve:
        """The profile's prefill curve, corrected in the same way."""
        slower = math.exp(self.log_slower)
        fixed_s, token_s, pair_s = (slower * s for s in (curve.fixed_s, curve.per_token_s, curve.per_pair_s))
        return PrefillCurve(fixed_s, token_s, pair_s, curve.samples + self.loads)


class CalibratedCosts:
    """Costs whose rates follow the loads and the steps: the profile times one factor each.

    The factor is an exponentially weighted mean of log(measured seconds / the profile's seconds), a
    geometric mean, so twice as slow and twice as fast have the same weight. One load, however slow,
    moves a measured rate by 10**(1/5), 1.6 times, at most, and an assumed one by 10**(1/2). Three consecutive
    loads that agree on another rate move it there. Both parts of a TransferRate move together: loads of
    one size cannot separate them, and at that size the prediction is right. The prefill
    curve follows in the same way. The time that steps wait for stores is learned from stores alone.
    """

    def __init__(self, costs: CostModel) -> None:
        self._profile = costs
        self.costs = costs
        rates = {Tier.DRAM: costs.dram, Tier.SSD: costs.ssd}
        self.drifts = {tier: RateDrift(prior=prior(rate)) for tier, rate in rates.items()}
        self.pace = RateDrift(prior=prior(costs.prefill))
        self.stall = RateDrift(prior=NO_PRIOR)

    def observe(self, moved: KVTransfer) -> None:
        """Learn from one transfer: a load, or a store that a step waited for."""
        if moved.direction == "store":
            self._stored(moved)
            return
        if not is_plausible(moved) or moved.tier not in self.drifts:
            return
        rate = self._profile.dram if moved.tier is Tier.DRAM else self._profile.ssd
        predicted_s = rate.seconds(moved.size_bytes)
        log_slower = math.log(self._own_s(moved)) - math.log(predicted_s)
        self.drifts[moved.tier] = self.drifts[moved.tier].updated(log_slower)
        self._correct()

    def observe_prefill(self, took_s: float, predicted_s: float) -> None:
        """Learn from one step: its seconds without loads and stores, and those of its tokens by `costs`."""
        if not (0.0 < took_s < math.inf and 0.0 < predicted_s < math.inf):
            return
        self.pace = self.pace.updated(self.pace.log_slower + math.log(took_s) - math.log(predicted_s))
        self.costs = replace(self.costs, prefill=self.pace.of_curve(self._profile.prefill))

    @property
    def samples(self) -> dict[str, int]:
        """How many measurements each rate has; 0: it is assumed."""
        of = self.costs
        counts = (of.prefill.samples, of.dram.samples, of.ssd.samples, of.store.samples)
        return dict(zip(("prefill", "dram", "ssd", "store"), counts, strict=True))

    def _stored(self, moved: KVTransfer) -> None:
        """A disk's own writes delay no step; a store to DRAM has the tier DRAM."""
        if not moved.in_step or moved.tier is not Tier.DRAM or not is_plausible(moved):
            return
        predicted_s = self._profile.dram.seconds(moved.size_bytes)
        self.stall = self.stall.updated(math.log(moved.duration_s) - math.log(predicted_s))
        self._correct()

    def _correct(self) -> None:
        of = self._profile
        back = replace(self.stall.of(of.dram), samples=self.stall.loads)  # the dram rate is only its scale
        self.costs = replace(
            of,
            prefill=self.pace.of_curve(of.prefill),
            dram=self.drifts[Tier.DRAM].of(of.dram),
            ssd=self.drifts[Tier.SSD].of(of.ssd),
            store=back if self.stall.loads else NO_STALL,
        )

    def _own_s(self, moved: KVTransfer) -> float:
        """The tier's own seconds: a disk load includes the copy to the GPU, which the cost model adds."""
        if moved.tier is Tier.DRAM:
            return moved.duration_s
        copy_s = self.costs.dram.seconds(moved.size_bytes)
        return max(moved.duration_s - copy_s, moved.duration_s * LEAST_READ_SHARE)


@dataclass(frozen=True, slots=True)
class FillRate:
    """Tokens stored into a tier, weighted with exp(-age / SETTLING_S)."""

    tokens: float = 0.0  # weighted sum
    squares: float = 0.0  # of the sizes, so squares / tokens is the typical store of a token
    first_s: float = math.inf
    last_s: float = -math.inf
    n: int = 0

    def after(self, tokens: int, now_s: float) -> FillRate:
        """With one more store."""
        left = math.exp(-max(0.0, now_s - self.last_s) / SETTLING_S)
        return FillRate(
            self.tokens * left + tokens,
            self.squares * left + tokens * tokens,
            min(self.first_s, now_s),
            max(self.last_s, now_s),
            self.n + 1,
        )

    def tokens_per_s(self, now_s: float) -> float:
        """The weighted sum over the weighted time since the first store; 0 before that."""
        left = math.exp(-max(0.0, now_s - self.last_s) / SETTLING_S)
        seen_s = max(LEAST_SEEN_S, now_s - self.first_s)
        return self.tokens * left / (-math.expm1(-seen_s / SETTLING_S) * SETTLING_S)

    def chance(self, room_tokens: float, after_s: float, now_s: float) -> float:
        """The probability that at most `room_tokens` are stored within `after_s`."""
        coming = self.tokens_per_s(now_s) * max(0.0, after_s)
        if room_tokens < 0:
            return 0.0
        if coming <= 0:
            return 1.0
        spread = math.sqrt(coming * self.squares / self.tokens)
        return 0.5 * math.erfc((coming - room_tokens) / (spread * math.sqrt(2.0)))


TIERS_WRITTEN = {  # the tiers that a transfer writes
    (Tier.DRAM, "store"): (Tier.DRAM, Tier.SSD),
    (Tier.SSD, "load"): (Tier.DRAM,),
}


class TierSurvival:
    """The probability that a tier still holds a whole prefix some seconds from now.

    An LRU drops a prefix after as many newer tokens as the tier holds: Che's characteristic
    time, capacity / fill rate (Che, Tung & Wang, IEEE JSAC 20(7), 2002). Stores are modelled as a
    Poisson stream of the observed sizes, so the stored tokens within tau have mean r * tau and variance
    r * tau * size. The probability is that of a normal variable below capacity - prefix.

    Limits: hits that move other chunks ahead of this prefix are not counted, nor is the prefix's age
    (it counts as just stored, like a finished turn's), so the estimate is slightly high. It is low where
    only the tail is lost. It models LRU only. Without recent stores it is 1.
    """

    def __init__(self, capacity_tokens: Mapping[Tier, int]) -> None:
        self.capacity_tokens: dict[Tier, int] = {}
        self.fills: dict[Tier, FillRate] = {}
        self.resize(capacity_tokens)

    def resize(self, capacity_tokens: Mapping[Tier, int]) -> bool:
        """The tiers hold so many tokens now. One may be new, or gone. Returns whether anything changed."""
        is_new = capacity_tokens != self.capacity_tokens
        self.capacity_tokens = dict(capacity_tokens)
        self.fills = {tier: self.fills.get(tier, FillRate()) for tier in capacity_tokens}
        return is_new

    def observe(self, moved: KVTransfer, now_s: float) -> None:
        """Learn from one transfer at `now_s`. LMCache writes a store through to every tier, and
        promotes what it loads from disk into DRAM."""
        if not is_plausible(moved) or moved.tokens <= 0:
            return
        for tier in TIERS_WRITTEN.get((moved.tier, moved.direction), ()):
            if tier in self.fills:
                self.fills[tier] = self.fills[tier].after(moved.tokens, now_s)

    def chances(self, prefix_tokens: int, after_s: float, now_s: float) -> dict[Tier, float]:
        """By tier, 0 to 1, for CostModel.reload_s: that the whole prefix is there `after_s` from now."""
        return {
            tier: fill.chance(self.capacity_tokens[tier] - prefix_tokens, after_s, now_s)
            for tier, fill in self.fills.items()
        }


def prior(rate: TransferRate | PrefillCurve) -> int:
    """The weight of a profile's rate, in loads."""
    return PRIOR_LOADS if rate.samples else GUESS_LOADS


def is_plausible(moved: KVTransfer) -> bool:
    """Whether something moved, in a possible time."""
    return moved.size_bytes > 0 and 0.0 < moved.duration_s < math.inf
