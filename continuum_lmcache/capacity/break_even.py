"""The context from which on loading a prefix is faster than computing it; and what a pin is worth then."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from continuum_lmcache.errors import ConfigError
from continuum_lmcache.reload.cost_model import CostModel
from continuum_lmcache.retention.ttl_solver import TtlChoice, best_ttl
from continuum_lmcache.tools.distribution import DurationDistribution, kaplan_meier
from continuum_lmcache.types import Residency, Tier


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Seconds to load n tokens: fixed_s + n * per_token_s."""

    fixed_s: float
    per_token_s: float

    def seconds(self, tokens: float) -> float:
        return self.fixed_s + tokens * self.per_token_s


def linear_load_cost(costs: CostModel, tier: Tier) -> LinearCost:
    """The cost of a load from `tier`; a load from disk passes through DRAM, as in cost_model.py."""
    dram = LinearCost(costs.dram.fixed_s, costs.kv_bytes_per_token / costs.dram.bytes_per_s)
    if tier is Tier.DRAM:
        return dram
    if tier is Tier.SSD:
        per_token_s = dram.per_token_s + costs.kv_bytes_per_token / costs.ssd.bytes_per_s
        return LinearCost(dram.fixed_s + costs.ssd.fixed_s, per_token_s)
    raise ConfigError(f"nothing is loaded from tier {tier.value!r}; choose dram or ssd")


def break_even_tokens(costs: CostModel, tier: Tier) -> float:
    """The least context such that loading it, and every longer one, is no slower than computing it.

    The largest root of prefill - load = (f - a) + (p - b) n + q n^2 / 2, in tokens; 0 where loading
    always pays, infinite where computing is faster for all long contexts. That LMCache loads only whole
    chunks is left out.
    """
    load, prefill = linear_load_cost(costs, tier), costs.prefill
    ahead_s = prefill.fixed_s - load.fixed_s
    slope_s, bend_s = prefill.per_token_s - load.per_token_s, prefill.per_pair_s
    if bend_s == 0:
        if slope_s < 0 or (slope_s == 0 and ahead_s < 0):
            return math.inf
        return max(0.0, -ahead_s / slope_s) if slope_s else 0.0
    inside = slope_s * slope_s - 2 * bend_s * ahead_s
    return 0.0 if inside < 0 else max(0.0, (math.sqrt(inside) - slope_s) / bend_s)


@dataclass(frozen=True, slots=True)
class PinValue:
    """Eq. 2 (arXiv 2511.02230 §4) for one context, by where its KV would be without the pin.

    With no queue, T = 0. `least_delay_s` is the least T from which some pin pays.
    """

    tier: Tier
    reload_s: float  # PrefillReload: what the pin saves if the program returns in time
    best: TtlChoice  # the TTL with the largest gain
    gain_s: float  # P(tau) * reload - tau, per turn; 0: no pin pays
    least_delay_s: float  # pins pay where T * eta is above this; <= 0: always


def pin_values(
    costs: CostModel, context_tokens: int, gaps_s: Sequence[float], max_ttl_s: float
) -> dict[Tier, PinValue]:
    """The worth of a pin for each place of the whole context. Without gaps: cold, Exp(1)."""
    ended_s = tuple(sorted(gaps_s))
    level = "all" if ended_s else "cold"
    seen = DurationDistribution(level, ended_s, kaplan_meier(ended_s, ()), len(ended_s))
    places = {
        Tier.DRAM: Residency(0, context_tokens, 0, context_tokens),
        Tier.SSD: Residency(0, 0, context_tokens, context_tokens),
        Tier.NONE: Residency(0, 0, 0, context_tokens),
    }
    return {tier: pin_value(tier, costs.reload_s(where), seen, max_ttl_s) for tier, where in places.items()}


def pin_value(tier: Tier, reload_s: float, seen: DurationDistribution, max_ttl_s: float) -> PinValue:
    """Eq. 2 with T = 0, and the T from which its maximum is above 0.

    P(tau) (T + reload) > tau for some recorded tau if T is above the least tau / P(tau), minus the
    reload. Cold, P is Exp(1)'s, and its gain is above 0 if T + reload is above 1.
    """
    best = best_ttl(seen, reload_s, max_ttl_s)
    ratios = [gap / p for gap, p in zip(seen.samples_s, seen.cdf, strict=True) if gap <= max_ttl_s]
    least_s = min(ratios, default=1.0 if seen.level == "cold" else math.inf)
    return PinValue(tier, reload_s, best, best.probability * reload_s - best.ttl_s, least_s - reload_s)
