"""How many live programs an engine serves in time: the signal to scale by. Admission's own arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from continuum_lmcache.policy.interface import Room

P90_WAITS = 3.0  # mean waits: the 90th percentile of first tokens at the limit (docs/fleet.md)


class Pace(NamedTuple):
    """The programs between two turns, and how fast turns end."""

    forecast_tokens: float  # of a program with a place, at the mean; above 0
    away: int  # programs in tool calls, with a place
    yielded: int  # and without one
    turn_s: float  # between the ends of the latest turns; 0 before the second


def served_in_time(room: Room, pace: Pace, limit_s: float) -> float:
    """With how many live programs nine of ten first tokens come within `limit_s` seconds.

    The contexts that fit the GPU run at the same time. Meanwhile others are in tool calls: as many as now,
    since a GPU that is full ends no fewer turns a second. The contexts of those with a place must fit too, on
    the GPU or in a tier. More wait: by Little's law turns a second times the mean wait. One is always served.
    """
    running, placed = (
        max(0.0, tokens - room.head_tokens) / pace.forecast_tokens
        for tokens in (room.fits_tokens, max(room.fits_tokens, room.tier_tokens))
    )
    waiting = limit_s / P90_WAITS / pace.turn_s if pace.turn_s else 0.0
    return max(1.0, min(running + pace.away, placed) + pace.yielded + waiting)


def engines_for(live: Mapping[Any, float], in_time: Mapping[Any, float]) -> float | None:
    """How many engines like these would serve in time all programs that these have; None: none says how many
    it serves. Both by engine; one that has had no program says nothing yet."""
    shares = [live[engine] / most for engine, most in in_time.items() if engine in live]
    return sum(shares) if shares else None
