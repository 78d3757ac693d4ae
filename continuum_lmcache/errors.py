"""The errors of this package, by their cause."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """For the message about an unknown name: the nearest known one in any case, and all of them."""
    names = {one.casefold(): one for one in known}
    near = difflib.get_close_matches(name.casefold(), names, n=1)
    return (f"did you mean {names[near[0]]!r}? " if near else "") + f"Known: {', '.join(names.values())}"


class ContinuumError(Exception):
    """Any error this package raises on purpose."""


class ConfigError(ContinuumError, ValueError):
    """A setting is unknown, malformed, or contradicts another."""


class RequestError(ContinuumError, ValueError):
    """One request has a bad field; it alone is refused (HTTP 400)."""


class ProfileError(ContinuumError, ValueError):
    """A measured profile is missing, malformed, or implausible."""


class DurationsError(ContinuumError, ValueError):
    """Saved tool durations do not have their format."""


class TraceError(ContinuumError, ValueError):
    """A trace file does not have its format."""


class ServerError(ContinuumError, RuntimeError):
    """A running server does not answer, or not as vLLM does."""


class InvariantError(ContinuumError, AssertionError):
    """The tables do not balance. The message is the equation, with its numbers."""
