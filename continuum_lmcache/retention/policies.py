"""The policies by name: for how long a finished turn's KV stays on the GPU, and the queue's order.

A policy is two pure functions. `retain` returns a TTL in seconds, 0 for no
pin; the scheduler's budgets may still refuse it. `order` returns a waiting turn's place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from continuum_lmcache.config import ContinuumConfig
from continuum_lmcache.errors import ConfigError, nearest
from continuum_lmcache.reload.cost_model import CostModel
from continuum_lmcache.retention import baselines
from continuum_lmcache.retention.queue_order import (
    Order,
    least_attained_service,
    pinned_first,
    program_fcfs,
    request_fcfs,
)
from continuum_lmcache.retention.ttl_solver import best_ttl, retention_of
from continuum_lmcache.tools.durations import ToolDurations
from continuum_lmcache.types import EngineLoad, FinishedTurn, QueueEntry, Retention

Retain = Callable[[FinishedTurn, ToolDurations, CostModel, EngineLoad, ContinuumConfig], Retention]


@dataclass(frozen=True, slots=True)
class Policy:
    """The two functions that the scheduler calls."""

    retain: Retain
    order: Callable[[QueueEntry], Order]
    has_extensions: bool = False  # beyond its paper: admission, priced pins, ... (`effective`)


def continuum(
    turn: FinishedTurn, gaps: ToolDurations, _costs: CostModel, load: EngineLoad, config: ContinuumConfig
) -> Retention:
    """Eq. 2 (arXiv 2511.02230 §4), with PrefillReload from where the prefix really is.

    A return in time saves T * eta of queueing and the reload. A negative eta (long programs
    become longer) lowers the benefit, as in the formula. While cold, eta is 1. For a program
    that is away already, only the rest of the gap counts.
    """
    seen = gaps.distribution(turn.tool).after(load.away_s)
    cold = seen.level == "cold"
    benefit_s = load.queue_delay_s * (1.0 if cold else load.eta) + load.reload_s
    best = best_ttl(seen, benefit_s, config.max_ttl_s, load.price)
    return retention_of(seen, best, benefit_s, "cold-start" if cold else "cdf", config, load.price)


POLICIES: dict[str, Policy] = {
    "fcfs": Policy(baselines.no_retention, request_fcfs),
    "program-fcfs": Policy(baselines.no_retention, program_fcfs),
    "static-ttl": Policy(baselines.static_ttl, pinned_first),
    "mean-threshold": Policy(baselines.mean_threshold, pinned_first),
    "plas": Policy(baselines.no_retention, least_attained_service),
    "infercept": Policy(baselines.infercept, program_fcfs),
    "three-way": Policy(baselines.three_way, pinned_first),
    "continuum-published": Policy(continuum, pinned_first),
    "continuum": Policy(continuum, pinned_first, has_extensions=True),
}


def effective(config: ContinuumConfig) -> ContinuumConfig:
    """The settings, without those that a paper's policy does not have. Raises ConfigError."""
    if policy_named(config.policy).has_extensions:
        return config
    return replace(
        config,
        admission=False,
        evict_ended_programs=False,
        priced_pins=False,
        measured_chunk=False,
    )


def policy_named(name: str) -> Policy:
    """The policy of that name. Raises ConfigError with the known names."""
    if name in POLICIES:
        return POLICIES[name]
    raise ConfigError(f"continuum.policy is {name!r}; {nearest(name, POLICIES)}")
