"""The context from which on loading a prefix is faster than computing it."""

from __future__ import annotations

import math

from continuum_lmcache.errors import ConfigError
from continuum_lmcache.reload.cost_model import CostModel
from continuum_lmcache.types import Tier


def load_cost(costs: CostModel, tier: Tier) -> tuple[float, float]:
    """Seconds of a load from `tier`, once and for each token; one from disk passes through DRAM."""
    if tier not in (Tier.DRAM, Tier.SSD):
        raise ConfigError(f"nothing is loaded from tier {tier.value!r}; choose dram or ssd")
    rates = (costs.dram,) if tier is Tier.DRAM else (costs.dram, costs.ssd)
    per_token_s = sum(costs.kv_bytes_per_token / rate.bytes_per_s for rate in rates)
    return sum(rate.fixed_s for rate in rates), per_token_s


def break_even_tokens(costs: CostModel, tier: Tier) -> float:
    """The least context such that loading it, and every longer one, is no slower than computing it.

    The largest root of prefill - load = (f - a) + (p - b) n + q n^2 / 2, in tokens; 0 where loading
    always pays, infinite where computing is faster for all long contexts. That LMCache loads only whole
    chunks is left out.
    """
    (fixed_s, per_token_s), prefill = load_cost(costs, tier), costs.prefill
    ahead_s = prefill.fixed_s - fixed_s
    slope_s, bend_s = prefill.per_token_s - per_token_s, prefill.per_pair_s
    if bend_s == 0:
        if slope_s < 0 or (slope_s == 0 and ahead_s < 0):
            return math.inf
        return max(0.0, -ahead_s / slope_s) if slope_s else 0.0
    inside = slope_s * slope_s - 2 * bend_s * ahead_s
    return 0.0 if inside < 0 else max(0.0, (math.sqrt(inside) - slope_s) / bend_s)
