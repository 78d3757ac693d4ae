"""The policies by name: for how long a finished turn's KV stays on the GPU, and the queue's order.

A policy is two pure functions. `retain` returns a TTL in seconds, 0 for no
pin; the scheduler's budgets may still refuse it. `order` returns a waiting turn's place.
`continuum.policy` names one of POLICIES, or as `module:name` a Policy anywhere on Python's path.
"""

from __future__ import annotations

import inspect
import math
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from continuum_lmcache.config import ContinuumConfig
from continuum_lmcache.errors import ConfigError, nearest
from continuum_lmcache.reload.cost_model import CostModel
from continuum_lmcache.retention.queue_order import Order, pinned_first
from continuum_lmcache.retention.ttl_solver import best_ttl, retention_of
from continuum_lmcache.tools.durations import ToolDurations
from continuum_lmcache.types import EngineLoad, FinishedTurn, QueueEntry, Retention

DIVERGES = 0.25  # of what was kept: whose returns repeat less is not pinned
Retain = Callable[[FinishedTurn, ToolDurations, CostModel, EngineLoad, ContinuumConfig], Retention]
PARAMETERS = {"retain": "turn, gaps, costs, load, config", "order": "entry"}


@dataclass(frozen=True, slots=True)
class Features:
    """What the scheduler does besides pins and order. Experiments switch single ones off."""

    admission: bool = True  # new programs wait while the started ones fill the KV cache
    evict_ended_programs: bool = True  # evict ended KV first; hold nothing after calls that few return from
    priced_pins: bool = True  # charge a pin fully only while a turn or a new program waits, and renew its TTL
    measured_chunk: bool = True  # decodes before prompts, in chunks sized by the times of earlier steps
    load_or_recompute: bool = True  # load from a tier only what is cheaper to load, by measured rates


PUBLISHED = Features(admission=False, evict_ended_programs=False, priced_pins=False, measured_chunk=False)
"""Of a policy that is served as its paper has it, but for what is loaded: load_or_recompute stays."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The two functions that the scheduler calls, and what it does besides."""

    retain: Retain
    order: Callable[[QueueEntry], Order]
    features: Features = Features()


def continuum(
    turn: FinishedTurn, gaps: ToolDurations, _costs: CostModel, load: EngineLoad, config: ContinuumConfig
) -> Retention:
    """Eq. 2 (arXiv 2511.02230 §4), with PrefillReload from where the prefix really is.

    A return in time saves T * eta of queueing and the reload. A negative eta (long programs
    become longer) lowers the benefit, as in the formula. While cold, eta is 1. For a program
    that is away already, only the rest of the gap counts. Beyond the paper, the benefit is multiplied by the
    share of the kept contexts that the program's latest returns repeated.
    """
    seen = gaps.distribution(turn.tool).after(load.away_s)
    cold = seen.level == "cold"
    repeats = turn.repeated_share if turn.repeated_share >= DIVERGES else 0.0
    benefit_s = repeats * (load.queue_delay_s * (1.0 if cold else load.eta) + load.reload_s)
    ttl_s = best_ttl(seen, benefit_s, config.max_ttl_s, load.price)
    reason = "cold-start" if cold else "cdf" if repeats else "diverges"
    return retention_of(seen, ttl_s, benefit_s, reason, config, load.price)


def static_ttl(
    _turn: FinishedTurn, _gaps: ToolDurations, _costs: CostModel, _load: EngineLoad, config: ContinuumConfig
) -> Retention:
    """The same TTL for every turn, `continuum.static_ttl_s` (the paper's ablation, Fig. 16)."""
    return Retention(config.static_ttl_s, config.policy, "static", cost_s=config.static_ttl_s)


POLICIES: dict[str, Policy] = {
    "continuum": Policy(continuum, pinned_first),
    "continuum-published": Policy(continuum, pinned_first, PUBLISHED),
    "static-ttl": Policy(static_ttl, pinned_first, PUBLISHED),
}


def policy_named(name: str) -> Policy:
    """The policy of that name, or the one at `module:name`. Raises ConfigError."""
    if name in POLICIES:
        return POLICIES[name]
    if ":" not in name:
        raise ConfigError(
            f"continuum.policy is {name!r}; {nearest(name, POLICIES)}; one of your own is module:name"
        )
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"continuum.policy is {name!r}: {error}; it must be module:name, the module on the PYTHONPATH of "
            "the server"
        ) from error
    if not isinstance(found, Policy):
        raise ConfigError(f"continuum.policy is {name!r}, a {type(found).__name__}; it must be a Policy")
    for field, takes in PARAMETERS.items():
        try:
            inspect.signature(getattr(found, field)).bind(*takes.split(", "))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"continuum.policy is {name!r}: {error}; its {field} must take ({takes})"
            ) from error
    return replace(found, retain=checked(name, found.retain))


def checked(name: str, retain: Retain) -> Retain:
    """The same function. It raises ConfigError for an answer that is no TTL; nan would be a pin for ever."""

    def answer(*asked: Any) -> Retention:
        keep = retain(*asked)
        ttl_s = keep.ttl_s if isinstance(keep, Retention) else None
        if not (isinstance(ttl_s, int | float) and 0.0 <= ttl_s < math.inf):
            raise ConfigError(
                f"continuum.policy {name!r} answered {keep!r}; it must be a Retention, ttl_s finite and >= 0"
            )
        return keep

    return answer
