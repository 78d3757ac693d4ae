"""The context from which on loading a prefix is faster than computing it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from continuum_lmcache.errors import ConfigError
from continuum_lmcache.reload.cost_model import CostModel
from continuum_lmcache.types import Tier


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
