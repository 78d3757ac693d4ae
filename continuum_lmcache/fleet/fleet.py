"""A fleet of replicas: where each turn goes, and what moves. Owns that state.

No clock, no I/O, no engine: every event has its time as an argument. A host (an actor of Ray Serve, the
simulator) passes on what replicas report, and asks where each turn goes. Nothing waits here: each engine
admits new programs for itself.

Where a turn goes:
    of a new program, or of none      to the least busy replica (least_busy.py)
    of a program with a home          home; to the least busy replica, where that pays
    of a program that lost its home   to the least busy replica, its home from then on

What a turn or a report costs does not grow with the replicas or programs: a turn looks at its home and at
the least busy replica, and a report brings the programs that have changed.

A move saves waiting at home and costs the context's KV, which the other replica must compute. It is
considered as a turn arrives, between turns only, and only where replicas report what a turn waits: engines
that admit programs themselves do not, since there moves gain nothing (docs/fleet.md). Nothing moves by old
reports, and no program moves twice within COOLDOWN_S, so thrash (several moves within it) is impossible.

A program is `identity.program_id(job_id, tenant)`, or a hash of it: ids of two tenants never collide. What
is known of a program comes from the replica that serves it (`on_report`), so a fleet that has lost its state
has it again once each replica has reported all its programs. A Route's `program_turns` and `program_age_s`
are for the engine, which holds no program back that has started.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum

from continuum_lmcache.errors import InvariantError
from continuum_lmcache.fleet.least_busy import LeastBusy, ReplicaId, ReplicaReport
from continuum_lmcache.reload.cost_model import UNMEASURED
from continuum_lmcache.types import MOST_PROGRAMS, ProgramId

COST_FACTOR = 2.0  # the wait that a move saves must be this many times the cost of the KV
MARGIN_S = 2.0  # and this much more: the hysteresis
COOLDOWN_S = 30.0  # between two moves of a program, at least
IDLE_S = 3600.0  # a program without a turn for so long is forgotten
PROGRAMS_A_REPLICA = 10_000  # known at a time, of a fleet of more than ten; of a smaller one MOST_PROGRAMS


@dataclass(frozen=True, slots=True)
class KnownProgram:
    """A program, as a replica that served turns of it knows it."""

    program: ProgramId
    turns: int  # finished, here and elsewhere
    context_tokens: int  # of the last finished turn
    age_s: float  # since it arrived
    idle_s: float = 0.0  # since its latest turn there began
    is_live: bool = False  # a turn is in flight there
    is_over: bool = False


class RouteReason(Enum):
    """Why a turn goes to its replica. Low cardinality: these are metric labels."""

    HOME = "home"
    FIRST = "first"  # its program starts there
    MOVED = "moved"
    REHOMED = "rehomed"  # its program had lost its replica
    ALONE = "alone"  # a request without a program


@dataclass(frozen=True, slots=True)
class Route:
    """Send the turn there now."""

    replica: ReplicaId
    why: RouteReason
    program_turns: int = 0  # finished: for the engine
    program_age_s: float = 0.0


@dataclass(slots=True)
class FleetProgram:
    """A program that the fleet knows."""

    id: ProgramId
    home: ReplicaId  # which may be gone
    arrival_s: float
    seen_s: float  # its latest turn began
    turns: int = 0  # finished
    context_tokens: int = 0  # of the last finished turn
    is_live: bool = False  # a turn was sent, and home has not said that it ended
    moved_s: float = -math.inf


class Fleet:
    """Replicas and programs."""

    def __init__(self) -> None:
        self.least_programs = MOST_PROGRAMS  # known at a time, however few replicas there are
        self.replicas = LeastBusy()
        self.programs: OrderedDict[ProgramId, FleetProgram] = OrderedDict()  # idle longest first
        self.routes: Counter[RouteReason] = Counter()

    @property
    def most_programs(self) -> int:
        return max(self.least_programs, PROGRAMS_A_REPLICA * len(self.replicas))

    def on_report(self, now_s: float, report: ReplicaReport, programs: Iterable[KnownProgram] = ()) -> None:
        """A replica's report, with its programs that have changed; the first one adds the replica."""
        self.replicas.on_report(now_s, report)
        for known in programs:
            self._learn(now_s, report.replica, known)
        while self.programs and now_s - (oldest := next(iter(self.programs.values()))).seen_s >= IDLE_S:
            self._forget(oldest)

    def on_arrival(
        self, now_s: float, program: ProgramId | None, gone: Collection[str] = (), may_move: bool = True
    ) -> Route | None:
        """Where a turn goes that has arrived; None: there is no replica.

        `gone`: replicas that cannot be reached, though they may have reported. `may_move`: False for a turn
        that home alone can answer.
        """
        entry = self.programs.get(program) if program is not None else None
        if entry is None or entry.home in gone or entry.home not in self.replicas:
            chosen = self.replicas.least(now_s, gone)
            if chosen is None:
                return None
            if program is None:
                return self._send(chosen, RouteReason.ALONE)
            why = RouteReason.FIRST if entry is None else RouteReason.REHOMED
            entry = entry or self._add(now_s, program, chosen)
            self._settle(entry, chosen)
        elif may_move and (target := self._target(now_s, entry, gone)) is not None:
            self.replicas[target].sent_s += _recompute_s(entry)
            self._settle(entry, target)
            entry.moved_s = now_s
            why = RouteReason.MOVED
        else:
            why = RouteReason.HOME
        entry.seen_s, entry.is_live = now_s, True
        self.programs.move_to_end(entry.id)
        return self._send(entry.home, why, entry.turns, now_s - entry.arrival_s)

    def check(self) -> None:
        """Raise InvariantError unless the tables balance."""
        self.replicas.check()
        homes = Counter(entry.home for entry in self.programs.values())
        if homes != +self.replicas.homes:
            raise InvariantError(f"programs by home({homes}) != counted({self.replicas.homes})")
        most = max(self.most_programs, PROGRAMS_A_REPLICA * len(homes))  # a replica of these may be gone
        if len(self.programs) > most:
            raise InvariantError(f"programs({len(self.programs)}) > most_programs({most})")

    # -----------------------------------------------------------------------

    def _target(self, now_s: float, entry: FleetProgram, gone: Collection[str]) -> ReplicaId | None:
        """The least busy replica, if the wait saved there exceeds the KV's cost by COST_FACTOR and MARGIN_S.

        The program stays while a turn of it is in flight.
        """
        home = self.replicas[entry.home]
        if entry.is_live or home.wait_s is None or home.wait_s <= MARGIN_S or not home.is_fresh(now_s):
            return None
        if now_s - entry.moved_s < COOLDOWN_S:
            return None
        name = self.replicas.least(now_s, gone)
        if name is None or name == entry.home:
            return None
        other = self.replicas[name]
        if other.wait_s is None or not other.is_fresh(now_s):
            return None
        gain_s = home.wait_s - other.wait_s - COST_FACTOR * _recompute_s(entry)
        return name if gain_s > MARGIN_S else None

    def _send(self, replica: ReplicaId, why: RouteReason, turns: int = 0, age_s: float = 0.0) -> Route:
        self.replicas[replica].sent += 1
        self.routes[why] += 1
        return Route(replica, why, turns, age_s)

    def _learn(self, now_s: float, replica: ReplicaId, known: KnownProgram) -> None:
        """A replica's word on a program. If two replicas know it, its home is where its latest turn began."""
        entry, began_s = self.programs.get(known.program), now_s - known.idle_s
        if known.is_over:
            if entry is not None and entry.home == replica:
                self._forget(entry)
            return
        if entry is None:
            entry = self._add(now_s, known.program, replica)
            entry.seen_s, entry.moved_s = began_s, now_s  # it may have moved just before
        elif entry.home != replica:
            if began_s <= entry.seen_s:
                return
            self._settle(entry, replica)
        entry.arrival_s = min(entry.arrival_s, now_s - known.age_s)
        entry.turns, entry.context_tokens = known.turns, known.context_tokens
        entry.is_live = known.is_live or began_s < entry.seen_s  # or a turn is on its way there
        entry.seen_s = max(entry.seen_s, began_s)

    def _add(self, now_s: float, program: ProgramId, home: ReplicaId) -> FleetProgram:
        if len(self.programs) >= self.most_programs:
            self._forget(next(iter(self.programs.values())))
        entry = self.programs[program] = FleetProgram(program, home, now_s, now_s)
        self.replicas.count(home, 1)
        return entry

    def _settle(self, entry: FleetProgram, home: ReplicaId) -> None:
        """The program has another home."""
        self.replicas.count(entry.home, -1)
        self.replicas.count(home, 1)
        entry.home = home

    def _forget(self, entry: FleetProgram) -> None:
        del self.programs[entry.id]
        self.replicas.count(entry.home, -1)


def _recompute_s(entry: FleetProgram) -> float:
    """Seconds to compute the program's context elsewhere. A tier that replicas share may bring it sooner, but
    moves that count on that are slower (experiments/records/fleet-figures.md)."""
    return UNMEASURED.prefill.seconds(entry.context_tokens, 0)
