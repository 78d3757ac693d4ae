"""The policies by name, and those of one's own: found, and their answers checked.

`continuum.policy` names one of POLICIES, or as `module:name` a Policy anywhere on Python's path.
"""

from __future__ import annotations

import inspect
import math
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from continuum_lmcache.config import ContinuumConfig
from continuum_lmcache.errors import ConfigError, nearest
from continuum_lmcache.policy.continuum import continuum
from continuum_lmcache.policy.interface import Chunk, Eviction, Policy
from continuum_lmcache.policy.published import published
from continuum_lmcache.policy.static_ttl import static_ttl
from continuum_lmcache.reload.load_policy import LoadChoice, LoadReason, LoadState
from continuum_lmcache.types import Place, Residency, Retention, Start

POLICIES: dict[str, Policy] = {
    "continuum": continuum,
    "continuum-published": published,
    "static-ttl": static_ttl,
}


class Question(NamedTuple):
    """How one of a policy's functions is called, and which answers are right."""

    takes: str
    kind: type | tuple[type, ...]
    answer: str
    is_right: Callable[..., bool]  # of an answer of that kind, and of what was asked


def is_time(value: Any, most_s: float = math.inf) -> bool:
    return isinstance(value, int | float) and 0.0 <= value <= most_s


def is_choice(chosen: Any, reason: Any) -> bool:
    return type(chosen) is bool and isinstance(reason, str)


def is_order(answer: Any, *_: Any) -> bool:
    return all(isinstance(n, int | float) and n == n for n in answer)


def is_load(answer: Any, where: Residency, _: LoadState) -> bool:
    held = (0, where.dram_tokens, where.dram_tokens + where.ssd_tokens)
    tokens_are_right = type(answer.tokens) is int and answer.tokens in held
    costs_are_right = is_time(answer.chosen_s) and is_time(answer.excess_s)
    return isinstance(answer.decision, LoadReason) and tokens_are_right and costs_are_right


LONGEST_S = sys.float_info.max
FUNCTIONS = {
    "retain": Question(
        "turn, state",
        Retention,
        "a Retention, ttl_s finite and >= 0, its reason a word",
        lambda a, *_: is_time(a.ttl_s, LONGEST_S) and isinstance(a.reason, str),
    ),
    "order": Question("entry", tuple, "a tuple of numbers", is_order),
    "may_start": Question(
        "first, room", Start, "a Start of a bool and a word", lambda a, *_: is_choice(a.may, a.reason)
    ),
    "gives_up_place": Question(
        "turn, state, places",
        Place,
        "a Place of a bool, a word and expected_s >= 0",
        lambda a, *_: is_choice(a.is_kept, a.reason) and is_time(a.expected_s),
    ),
    "chunk": Question(
        "step",
        Chunk,
        "a Chunk of an int above 0 and a word",
        lambda a, *_: type(a.tokens) is int and a.tokens > 0 and isinstance(a.reason, str),
    ),
    "to_load": Question(
        "where, state",
        LoadChoice,
        "a LoadChoice of a LoadReason and, as an int, all that the tiers hold, DRAM's part or 0",
        is_load,
    ),
    "evicts_first": Question(
        "end", Eviction, "an Eviction of a bool and a word", lambda a, *_: is_choice(a.is_first, a.reason)
    ),
    "longest_wait_s": Question("line", (int, float), "a number of seconds >= 0", lambda a, *_: is_time(a)),
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
    needed = ("retain", "order")
    made = {n: checked(name, n, f) for n, f in functions.items() if f is not None or n in needed}
    return replace(found, **made)


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
        if not (isinstance(found, asked.kind) and asked.is_right(found, *values)):
            raise ConfigError(
                f"continuum.policy {name!r}: {field} answered {found!r}; it must be {asked.answer} (asked of "
                f"{values[0]!r:.300})"
            )
        return found

    return answer
