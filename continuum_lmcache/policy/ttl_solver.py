"""Eq. 2 of Continuum (arXiv 2511.02230 §4): the TTL with the largest gain.

    tau* = argmax over tau in {0} and the recorded gaps of f:  P(tau, f) * benefit_s - tau
    benefit_s = T * eta + PrefillReload(r)

A second of pin costs a second: the paper's MemUsage(r) / M is on both sides and cancels. That is as if a turn
always waited for the pin's blocks. `price` is another cost of a second (continuum.py).
"""

from __future__ import annotations

import math
from bisect import bisect_right

from continuum_lmcache.tools.distribution import DurationDistribution
from continuum_lmcache.types import Retention

PART = 32  # gaps, about the square root of a full window


def best_ttl(seen: DurationDistribution, benefit_s: float, max_ttl_s: float, price: float = 1.0) -> float:
    """tau* within [0, max_ttl_s], in seconds; the shortest of equals.

    P is a staircase, so between two recorded gaps only the cost grows: no tau in between can be
    better. The ceiling limits the candidates, not the answer, since the best TTL below it
    need not be the ceiling itself. Gaps are searched in parts of PART. A part is skipped if even its last
    probability at its first cost would not win.
    """
    if seen.level == "cold":
        return best_cold_ttl(benefit_s / price, max_ttl_s)
    if benefit_s <= 0.0:
        return 0.0
    gaps_s, cdf = seen.samples_s, seen.cdf
    allowed = bisect_right(gaps_s, max_ttl_s)
    parts = range(0, allowed, PART)
    reached_s = max([cdf[at] * benefit_s - price * gaps_s[at] for at in parts], default=0.0)
    best_s, best_gain_s = 0.0, 0.0
    for begin in parts:
        end = min(begin + PART, allowed)
        if cdf[end - 1] * benefit_s - price * gaps_s[begin] < reached_s:
            continue
        for ttl_s, probability in zip(gaps_s[begin:end], cdf[begin:end], strict=True):
            gain_s = probability * benefit_s - price * ttl_s
            if gain_s > best_gain_s:
                best_s, best_gain_s = ttl_s, gain_s
    return best_s


def best_cold_ttl(benefit_s: float, max_ttl_s: float) -> float:
    """tau* while the gaps are modelled as Exp(1): ln(benefit_s), or 0 where that is negative.

    The gain (1 - exp(-tau)) * b - tau has the slope b * exp(-tau) - 1: positive up to tau = ln b
    and negative from there, so ln b is the maximum, 0 if b <= 1, and the ceiling if ln b is beyond.

    The paper has only a fixed T_default from Exp(1) with eta = 1. It is read here as: Exp(1), in
    seconds, replaces P(tau, f), and eq. 2 is solved for each request as usual. So a
    request whose reload costs nothing is not pinned even while nothing was learned.
    """
    return min(math.log(benefit_s), max_ttl_s) if benefit_s > 1.0 else 0.0


def retention_of(
    seen: DurationDistribution,
    ttl_s: float,
    benefit_s: float,
    reason: str,
    price: float = 1.0,
    asks_again: bool = False,
) -> Retention:
    """A decision, with the values behind it."""
    return Retention(
        ttl_s=ttl_s,
        reason=reason,
        probability=seen.probability(ttl_s),
        benefit_s=benefit_s,
        cost_s=price * ttl_s,
        samples=seen.n,
        level=seen.level,
        asks_again=asks_again,
    )
