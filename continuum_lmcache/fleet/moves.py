"""Whether a program's next turn goes to another replica than its home. Pure functions of one case.

A move saves waiting at home and costs the context's KV, which the target must compute. It is considered as a
turn arrives, between turns only. Two rules come before every mover: nothing moves by old reports, and no
program moves twice within `cooldown_s`, so thrash (several moves within it) is impossible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from continuum_lmcache.fleet.report import ReplicaId

COST_FACTOR = 2.0  # the wait that a move saves must be this many times the cost of the KV
MARGIN_S = 2.0  # and this much more: the hysteresis


@dataclass(frozen=True, slots=True)
class ReplicaOption:
    """One replica, as a program's next turn would find it."""

    replica: ReplicaId
    wait_s: float  # before its prompt is computed
    recompute_s: float = 0.0  # of its context; 0 at home
    is_fresh: bool = True  # whether its report is new enough for a move


@dataclass(frozen=True, slots=True)
class MoveCase:
    """A turn has arrived of a program that has a home and no other live turn."""

    home: ReplicaOption
    others: Sequence[ReplicaOption]
    since_move_s: float  # since the program's last move; inf: it never moved


Mover = Callable[[MoveCase], ReplicaId | None]
"""The replica to move to; None: the program stays."""


def never(_case: MoveCase) -> ReplicaId | None:
    """Always home."""
    return None


def by_cost(case: MoveCase) -> ReplicaId | None:
    """Where the saved wait most exceeds the KV's cost, if it does by COST_FACTOR and MARGIN_S."""
    gains_s = {
        other.replica: case.home.wait_s - other.wait_s - COST_FACTOR * other.recompute_s
        for other in case.others
        if other.is_fresh
    }
    best = max(gains_s, key=gains_s.__getitem__, default=None)
    return best if best is not None and gains_s[best] > MARGIN_S else None


MOVERS: dict[str, Mover] = {"never": never, "cost": by_cost}


def decide(mover: str, case: MoveCase, cooldown_s: float) -> ReplicaId | None:
    """The decision of `mover`, a name of MOVERS, after the two rules. Raises KeyError for another name."""
    if not case.home.is_fresh or case.since_move_s < cooldown_s:
        return None
    return MOVERS[mover](case)
