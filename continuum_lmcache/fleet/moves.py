"""Whether a program's next turn goes to another replica than its home. Pure functions of one case.

A move saves waiting at home and costs the context's KV, which the target must load or compute. It is
considered as a turn arrives, between turns only. Two rules come before every mover: nothing moves by old
reports, and no program moves twice within `cooldown_s`, so thrash (several moves within it) is impossible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from continuum_lmcache.fleet.report import ReplicaId


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that an operator may set."""

    cooldown_s: float = 30.0  # from a program's move to its next, at least
    cost_factor: float = 2.0  # by_cost: the wait saved must be this many times the extra cost of the KV
    margin_s: float = 2.0  # by_cost: and this much more; the hysteresis


@dataclass(frozen=True, slots=True)
class ReplicaOption:
    """One replica, as a program's next turn would find it."""

    replica: ReplicaId
    wait_s: float  # before its prompt is computed
    reload_s: float  # PrefillReload of its context there; at home that of the lost part
    has_room: bool = True  # for its forecast, beside all reservations
    is_fresh: bool = True  # whether its report is new enough for a move


@dataclass(frozen=True, slots=True)
class MoveCase:
    """A turn has arrived of a program that has a home and no other live turn."""

    home: ReplicaOption
    candidates: Sequence[ReplicaOption]
    since_move_s: float  # since the program's last move; inf: it never moved


@dataclass(frozen=True, slots=True)
class Move:
    """Send the turn there."""

    to: ReplicaId


@dataclass(frozen=True, slots=True)
class Stay:
    """Send the turn home. Low cardinality: `reason` is a metric label."""

    reason: str  # "never", "stale", "cooldown", "room", "cost", "no-wait"


Mover = Callable[[MoveCase, Limits], Move | Stay]


def never(_case: MoveCase, _limits: Limits) -> Move | Stay:
    """Always home."""
    return Stay("never")


def by_cost(case: MoveCase, limits: Limits) -> Move | Stay:
    """Where the saved wait most exceeds the KV's cost, if it does by `cost_factor` and `margin_s`."""
    gains_s = {
        option.replica: gain_s(case, option, limits)
        for option in case.candidates
        if option.has_room and option.is_fresh
    }
    if not gains_s:
        return Stay("room")
    best = max(gains_s, key=gains_s.__getitem__)
    return Move(best) if gains_s[best] > limits.margin_s else Stay("cost")


MOVERS: dict[str, Mover] = {"never": never, "cost": by_cost}


def decide(mover: str, case: MoveCase, limits: Limits) -> Move | Stay:
    """The decision of `mover`, a name of MOVERS, after the two rules. Raises KeyError for another name."""
    if not case.home.is_fresh:
        return Stay("stale")
    if case.since_move_s < limits.cooldown_s:
        return Stay("cooldown")
    return MOVERS[mover](case, limits)


def gain_s(case: MoveCase, option: ReplicaOption, limits: Limits) -> float:
    """The wait that a move there saves, minus the weighted cost of its KV."""
    extra_s = max(0.0, option.reload_s - case.home.reload_s)
    return case.home.wait_s - option.wait_s - limits.cost_factor * extra_s
