"""One engine's figures for the metrics: counts since its start, and what is now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from continuum_lmcache.hearsay import Hearsay
from continuum_lmcache.rates import Rates
from continuum_lmcache.types import Outcome

if TYPE_CHECKING:
    from continuum_lmcache.vllm_plugin.keeper import Keeper

Totals = dict[str, dict[str, float]]  # by metric (metrics.py), then by its label


def totals_of(keeper: Keeper) -> Totals:
    """All of them."""
    ledger, supply = keeper.ledger, keeper.supply
    pins: dict[str, float] = {outcome.value: ledger.outcomes[outcome] for outcome in Outcome}
    return {
        "pins": {"taken": ledger.taken, **pins},
        "refused": dict(ledger.refused),
        "ignored": dict(keeper.ignored),
        "pinned_blocks": {"": ledger.pinned_blocks},
        "programs": {"": len(ledger.programs)},
        "store_up": {"": float(supply.is_up)},
        "store_mode": {supply.mode: 1.0},
        "load_decisions": dict(keeper.judge.counts),
        **supply.totals(),
        **rate_totals(keeper.appraiser.rates, supply.hearsay),
        **keeper.crowd.totals(),
    }


def rate_totals(rates: Rates, heard: Hearsay | None) -> Totals:
    """Every rate now in use, and how many measurements stand behind it."""
    learned = {} if heard is None else {"hit_share": heard.returns}
    costs = rates.costs
    curve, tiers = costs.prefill, {"dram": costs.dram, "ssd": costs.ssd}
    return {
        "rate_samples": {name: float(n) for name, n in (rates.samples | learned).items()},
        "tier_rate": {tier: rate.bytes_per_s for tier, rate in tiers.items()},
        "tier_fixed": {tier: rate.fixed_s for tier, rate in tiers.items()},
        "prefill": {"fixed": curve.fixed_s, "per_token": curve.per_token_s, "per_pair": curve.per_pair_s},
        "store_stall": {"": 1.0 / costs.store.bytes_per_s},
    }
