"""What real loads say about the tiers: how fast they are now, and how long they keep what they hold.

Both are told of every Transfer, and both say how many stand behind an answer. Times are arguments.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from continuum_lmcache.costs import Costs, Rate
from continuum_lmcache.tiers import Transfer
from continuum_lmcache.types import Tier

LEAST_GAIN = 0.1  # a lasting change arrives within 2 % (of its logarithm) after 40 loads
PRIOR_LOADS = 5  # what the profile weighs at first: the first load moves the rate by 1/5 of its error
MOST_OFF = 10.0  # times; a load further off than this says no more than one that is
LEAST_READ_SHARE = 0.1  # of a disk load's seconds; the copy after it cannot have taken all of it
SETTLING_S = 300.0  # half of what a fill rate remembers is younger than ln 2 times this
LEAST_SEEN_S = 30.0  # a burst in a shorter time is spread over this: it says nothing of the next minute


@dataclass(frozen=True, slots=True)
class Drift:
    """How much slower a tier is than its profile says. 1/e to the `log_slower`-th of the rate is left."""

    log_slower: float = 0.0
    loads: int = 0

    def toward(self, log_slower: float) -> Drift:
        """After one more load, as robust as a mean can be: its error is cut at MOST_OFF."""
        cut = math.log(MOST_OFF)
        error = max(-cut, min(cut, log_slower - self.log_slower))
        gain = max(LEAST_GAIN, 1.0 / (self.loads + PRIOR_LOADS))
        return Drift(self.log_slower + gain * error, self.loads + 1)

    def of(self, rate: Rate) -> Rate:
        """The profile's rate, corrected. Its samples are the profile's and the loads since."""
        slower = math.exp(self.log_slower)
        return Rate(rate.bytes_per_s / slower, rate.fixed_s * slower, rate.samples + self.loads)


class Rates:
    """Costs whose tier rates follow the loads: the profile times one factor per tier.

    The factor is an exponentially weighted mean of log(seconds taken / seconds the profile says), a
    geometric mean, so that twice as slow and twice as fast weigh the same. One load, however slow,
    moves a rate by 10**(1/5), 1.6 times, at most; 50 loads at a tenth of the rate bring it there
    within 2 %. Both parts of a Rate move together: loads of one size cannot tell them apart, and at
    the sizes that are loaded the prediction is right.
    """

    def __init__(self, costs: Costs) -> None:
        self._profile = costs
        self.costs = costs
        self.drifts = {Tier.DRAM: Drift(), Tier.SSD: Drift()}
        self.refused = 0  # transfers that cannot be: no bytes, no time, or an unknown tier

    def observe(self, moved: Transfer) -> None:
        """Learn from one load. Stores do not count: nothing waits for the way back to be as fast."""
        if moved.direction == "store":
            return
        if not believable(moved) or moved.tier not in self.drifts:
            self.refused += 1
            return
        said_s = self._rate(moved.tier).seconds(moved.size_bytes)
        log_slower = math.log(self._own_s(moved)) - math.log(said_s)
        self.drifts[moved.tier] = self.drifts[moved.tier].toward(log_slower)
        self.costs = replace(
            self._profile,
            dram=self.drifts[Tier.DRAM].of(self._profile.dram),
            ssd=self.drifts[Tier.SSD].of(self._profile.ssd),
        )

    def _rate(self, tier: Tier) -> Rate:
        return self._profile.dram if tier is Tier.DRAM else self._profile.ssd

    def _own_s(self, moved: Transfer) -> float:
        """The seconds that were the tier's own: a disk load's hold the copy to the GPU, which Costs adds."""
        if moved.tier is Tier.DRAM:
            return moved.duration_s
        copy_s = self.costs.dram.seconds(moved.size_bytes)
        return max(moved.duration_s - copy_s, moved.duration_s * LEAST_READ_SHARE)


@dataclass(frozen=True, slots=True)
class Fill:
    """What goes into a tier, remembered with exp(-age / SETTLING_S)."""

    tokens: float = 0.0  # weighted sum
    squares: float = 0.0  # of the sizes, so that squares / tokens is the size of the usual token's store
    first_s: float = math.inf
    last_s: float = -math.inf
    n: int = 0

    def after(self, tokens: int, now_s: float) -> Fill:
        """With one more store."""
        left = math.exp(-max(0.0, now_s - self.last_s) / SETTLING_S)
        return Fill(
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


FILLS = {  # what comes into which tiers with a transfer
    (Tier.DRAM, "store"): (Tier.DRAM, Tier.SSD),
    (Tier.SSD, "load"): (Tier.DRAM,),
}


class Survival:
    """Answers: with what chance does a tier still hold all of a prefix some seconds from now?

    An LRU drops a prefix once as much as the tier holds has come in after it: Che's characteristic
    time, capacity / fill rate (Che, Tung & Wang, IEEE JSAC 20(7), 2002). Stores are taken as a
    Poisson stream of the sizes seen, so what comes in within tau has mean r * tau and variance
    r * tau * size, and the chance is that of a normal to stay within capacity - prefix.

    Limits: hits move others' chunks ahead of this prefix and are not counted, nor is its own age
    (it is asked about as if just stored, as a finished turn's is); so it is a little hopeful. Where
    only the tail was lost it is cautious. It knows LRU only. Nothing stored lately: certain.
    """

    def __init__(self, capacity_tokens: Mapping[Tier, int]) -> None:
        self.capacity_tokens = dict(capacity_tokens)
        self.fills = dict.fromkeys(self.capacity_tokens, Fill())

    def observe(self, moved: Transfer, now_s: float) -> None:
        """Learn from one transfer at `now_s`. LMCache writes a store through to every tier, and
        promotes what it loads from disk into DRAM."""
        if not believable(moved) or moved.tokens <= 0:
            return
        for tier in FILLS.get((moved.tier, moved.direction), ()):
            if tier in self.fills:
                self.fills[tier] = self.fills[tier].after(moved.tokens, now_s)

    def residence_s(self, tier: Tier, now_s: float) -> float:
        """For how long the tier keeps what nobody asks for; infinite while nothing comes in."""
        rate = self.fills[tier].tokens_per_s(now_s)
        return self.capacity_tokens[tier] / rate if rate > 0 else math.inf

    def chances(self, prefix_tokens: int, after_s: float, now_s: float) -> dict[Tier, float]:
        """By tier, 0 to 1, what Costs.reload_s weighs: that the prefix is all there `after_s` from now."""
        return {tier: self._chance(tier, prefix_tokens, after_s, now_s) for tier in self.fills}

    def _chance(self, tier: Tier, prefix_tokens: int, after_s: float, now_s: float) -> float:
        fill = self.fills[tier]
        coming = fill.tokens_per_s(now_s) * max(0.0, after_s)
        room = self.capacity_tokens[tier] - prefix_tokens
        if room < 0:
            return 0.0
        if coming <= 0:
            return 1.0
        spread = math.sqrt(coming * fill.squares / fill.tokens)
        return 0.5 * math.erfc((coming - room) / (spread * math.sqrt(2.0)))


def believable(moved: Transfer) -> bool:
    """Whether something moved, in a time that can be."""
    return moved.size_bytes > 0 and 0.0 < moved.duration_s < math.inf
