"""The same TTL for every turn, `continuum.static_ttl_s`: the paper's ablation (arXiv 2511.02230, Fig. 16)."""

from __future__ import annotations

from continuum_lmcache.policy import continuum, published
from continuum_lmcache.policy.interface import EngineState, Policy
from continuum_lmcache.types import FinishedTurn, Retention


def retain(_turn: FinishedTurn, state: EngineState) -> Retention:
    ttl_s = state.config.static_ttl_s
    return Retention(ttl_s, "static", cost_s=ttl_s)


static_ttl = Policy(retain, published.order, to_load=continuum.to_load)
