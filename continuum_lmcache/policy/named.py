"""The policies by name, and those of one's own: found, and their answers checked.

`continuum.policy` names one of POLICIES, or as `module:name` a Policy anywhere on Python's path.
"""

from __future__ import annotations

import inspect
import math
import pkgutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from continuum_lmcache.config import ContinuumConfig
from continuum_lmcache.errors import ConfigError, nearest
from continuum_lmcache.policy.continuum import continuum
from continuum_lmcache.policy.interface import Chunk, Eviction, Policy
from continuum_lmcache.policy.published import published
from continuum_lmcache.policy.static_ttl import static_ttl
from continuum_lmcache.reload.load_policy import LoadChoice
from continuum_lmcache.types import Place, Retention, Start

POLICIES: dict[str, Policy] = {
    "continuum": continuum,
    "continuum-published": published,
    "static-ttl": static_ttl,
}


class Question(NamedTuple):
    """How one of a policy's functions is called, and which answers are right."""

    takes: str
    answer: str
    is_right: Callable[..., bool]  # of the answer, and of what was asked


def is_time(value: Any) -> bool:
    return isinstance(value, int | float) and 0.0 <= value < math.inf


def is_order(answer: Any) -> bool:
    return isinstance(answer, tuple) and all(isinstance(n, int | float) and n == n for n in answer)


FUNCTIONS = {
    "retain": Question(
        "turn, state",
        "a Retention, ttl_s finite and >= 0",
        lambda a, *_: isinstance(a, Retention) and is_time(a.ttl_s),
    ),
    "order": Question("entry", "a tuple of numbers", lambda a, *_: is_order(a)),
    "may_start": Question("first, room", "a Start", lambda a, *_: isinstance(a, Start)),
    "gives_up_place": Question(
        "turn, state, places",
        "a Place, expected_s >= 0",
        lambda a, *_: isinstance(a, Place) and a.expected_s >= 0.0,
    ),
    "chunk": Question(
        "step",
        "a Chunk, tokens above 0",
        lambda a, *_: isinstance(a, Chunk) and type(a.tokens) is int and a.tokens > 0,
    ),
    "to_load": Question(
        "where, state",
        "a LoadChoice, tokens all that the tiers hold, DRAM's part or 0",
        lambda a, where, _: (
            isinstance(a, LoadChoice)
            and a.tokens in (0, where.dram_tokens, where.dram_tokens + where.ssd_tokens)
        ),
    ),
    "evicts_first": Question("end", "an Eviction", lambda a, *_: isinstance(a, Eviction)),
    "longest_wait_s": Question("line", "a number of seconds >= 0", lambda a, *_: is_time(a)),
}


def policy_of(config: ContinuumConfig) -> Policy:
    """The configured policy; without admission every program starts as it comes and keeps its place."""
    policy = policy_named(config.policy)
    return policy if config.admission else replace(policy, may_start=None, gives_up_place=None)


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
    functions = {field: getattr(found, field) for field in FUNCTIONS}
    return replace(
        found,
        **{
            field: checked(name, field, function)
            for field, function in functions.items()
            if function is not None or field in ("retain", "order")
        },
    )


def checked(name: str, field: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function. It raises ConfigError for a wrong answer: a TTL of nan would be a pin for ever."""
    asked = FUNCTIONS[field]
    try:
        inspect.signature(function).bind(*asked.takes.split(", "))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"continuum.policy is {name!r}: {error}; its {field} must take ({asked.takes})"
        ) from error

    def answer(*values: Any) -> Any:
        found = function(*values)
        if not asked.is_right(found, *values):
            raise ConfigError(
                f"continuum.policy {name!r}: {field} answered {found!r}; it must be {asked.answer}"
            )
        return found

    return answer
