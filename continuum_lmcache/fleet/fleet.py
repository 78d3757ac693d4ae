"""A fleet of replicas: where each turn goes, and what moves. Owns that state.

No clock, no I/O, no engine: every event has its time as an argument. A host (an actor of Ray Serve, the
simulator) passes on what replicas report, and asks where each turn goes. Nothing waits here: each engine
admits new programs for itself.

Where a turn goes:
    of a new program, or of none      to the replica with the fewest requests, of those with a fresh report
    of a program with a home          home; elsewhere, where a move pays
    of a program that lost its home   to the replica of a keyed hash (homes.py), its home from then on

The hash also picks a new program's replica if no report is fresh: without reports a fleet is a hash ring.

A move saves waiting at home and costs the context's KV, which the other replica must compute. It is
considered as a turn arrives, between turns only. Nothing moves by old reports, and no program moves twice
within `cooldown_s`, so thrash (several moves within it) is impossible.

A program is `identity.program_id(job_id, tenant)`, or a hash of it: ids of two tenants never collide. What
is known of a program comes from the replica that serves it (`on_report`), so a fleet that has lost its state
has it again once each replica has reported all its programs. A Route's `program_turns` and `program_age_s`
are for the engine, which holds no program back that has started.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

from continuum_lmcache.errors import InvariantError
from continuum_lmcache.fleet.homes import hashed_replica
from continuum_lmcache.reload.cost_model import UNMEASURED, PrefillCurve
from continuum_lmcache.types import MOST_PROGRAMS, ProgramId

ReplicaId = NewType("ReplicaId", str)
MOVERS = ("never", "cost")
COST_FACTOR = 2.0  # the wait that a move saves must be this many times the cost of the KV
MARGIN_S = 2.0  # and this much more: the hysteresis
REPORT_AGE_S = 3.0  # no new program, and no move, where the latest report is older
IDLE_S = 3600.0  # a program without a turn for so long is forgotten
GONE_S = 60.0  # a replica without a report for so long is dropped; with its next report it is back


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """One replica at one moment."""

    replica: ReplicaId
    at_s: float  # time of the figures, on the fleet's clock
    requests: int = 0  # waiting and running ones
    wait_s: float = 0.0  # before a later turn's prompt would be computed there
    prefill: PrefillCurve = UNMEASURED.prefill  # as measured there
    about: Mapping[str, int] = field(default_factory=dict)  # its rank and process, for the user


@dataclass(frozen=True, slots=True)
class KnownProgram:
    """A program, as the replica that served its latest turn knows it."""

    program: ProgramId
    turns: int  # finished, here and elsewhere
    context_tokens: int  # of the last finished turn
    age_s: float  # since it arrived
    live: int = 0  # turns in flight
    is_over: bool = False


class RouteReason(Enum):
    """Why a turn goes to its replica. Low cardinality: these are metric labels."""

    HOME = "home"
    FIRST = "first"  # its program starts there
    MOVED = "moved"
    REHOMED = "rehomed"  # its program had lost its replica
    HASHED = "hashed"  # a new program, and no report is fresh
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
    seen_s: float
    turns: int = 0  # finished
    context_tokens: int = 0  # of the last finished turn
    live: int = 0  # turns in flight, by home's latest word
    sent_s: float = -math.inf  # its latest turn
    moved_s: float = -math.inf


@dataclass(slots=True)
class ReplicaState:
    """One replica: its latest report, and what was sent there since."""

    report: ReplicaReport
    sent: int = 0  # turns
    sent_s: float = 0.0  # seconds to compute the contexts that moved there

    @property
    def requests(self) -> int:
        return self.report.requests + self.sent

    @property
    def wait_s(self) -> float:
        """Before a later turn's prompt would be computed there."""
        return self.report.wait_s + self.sent_s


class Fleet:
    """Replicas and programs. `key`: 1 to 64 bytes, the same wherever the hashes must be equal.

    `mover`: of MOVERS; "never": no program moves while its home is there. `cooldown_s`: between two moves of
    a program, at least.
    """

    def __init__(self, key: bytes, mover: str = "cost", cooldown_s: float = 30.0) -> None:
        self.mover, self.cooldown_s, self._key = mover, cooldown_s, key
        self.most_programs = MOST_PROGRAMS
        self.replicas: dict[ReplicaId, ReplicaState] = {}
        self.programs: OrderedDict[ProgramId, FleetProgram] = OrderedDict()  # idle longest first
        self.homes: Counter[ReplicaId] = Counter()  # programs by home
        self.routes: Counter[RouteReason] = Counter()

    def on_report(self, now_s: float, report: ReplicaReport, programs: Iterable[KnownProgram] = ()) -> None:
        """A replica's report, with its programs that have changed; the first one adds the replica. An older
        report than the latest one changes no figures."""
        latest = self.replicas.get(report.replica)
        if latest is None or report.at_s >= latest.report.at_s:
            self.replicas[report.replica] = ReplicaState(report)
        for known in programs:
            self._learn(now_s, report.replica, known)
        self._forget_idle(now_s)
        for name in [name for name, p in self.replicas.items() if now_s - p.report.at_s > GONE_S]:
            del self.replicas[name]

    def on_arrival(
        self,
        now_s: float,
        program: ProgramId | None,
        visible: Collection[str] | None = None,
        home: str | None = None,
        may_move: bool = True,
    ) -> Route | None:
        """Where a turn goes that has arrived; None: there is no replica.

        `visible`: the replicas that are there; None: all that have reported. `home`: the one of these that
        got the program's earlier turns while this fleet could not be asked. `may_move`: False for a turn
        that home alone can answer.
        """
        there = {name: p for name, p in self.replicas.items() if visible is None or name in visible}
        if not there:
            return None
        if program is None:
            return self._send(there, self._least_busy(now_s, there) or min(there), RouteReason.ALONE)
        entry = self.programs.get(program)
        if home in there and (entry is None or entry.home not in there):
            if entry is not None:
                self._forget(entry)
            entry = self._add(now_s, program, ReplicaId(home), turns=1)
        if entry is None:
            chosen, why = self._least_busy(now_s, there), RouteReason.FIRST
            if chosen is None:
                chosen, why = hashed_replica(program, there, self._key), RouteReason.HASHED
            entry = self._add(now_s, program, chosen)
        elif entry.home not in there:
            self._settle(entry, hashed_replica(program, there, self._key))
            why = RouteReason.REHOMED
        elif may_move and (target := self._target(now_s, entry, there)) is not None:
            there[target].sent_s += self._recompute_s(entry, there[target])
            self._settle(entry, target)
            entry.moved_s = now_s
            why = RouteReason.MOVED
        else:
            why = RouteReason.HOME
        entry.sent_s = entry.seen_s = now_s
        self.programs.move_to_end(program)
        return self._send(there, entry.home, why, entry.turns, now_s - entry.arrival_s)

    def is_fresh(self, now_s: float, replica: ReplicaId) -> bool:
        """Whether the replica's report is new enough for new programs and moves."""
        return now_s - self.replicas[replica].report.at_s <= REPORT_AGE_S

    def check(self) -> None:
        """Raise InvariantError unless the tables balance."""
        homes = Counter(entry.home for entry in self.programs.values())
        if homes != +self.homes:
            raise InvariantError(f"programs by home({homes}) != counted({self.homes})")
        if len(self.programs) > self.most_programs:
            raise InvariantError(f"programs({len(self.programs)}) > most_programs({self.most_programs})")
        seen_s = [entry.seen_s for entry in self.programs.values()]
        if seen_s != sorted(seen_s):
            raise InvariantError("programs are not in the order in which they were seen")

    # -----------------------------------------------------------------------

    def _least_busy(self, now_s: float, there: Mapping[ReplicaId, ReplicaState]) -> ReplicaId | None:
        """The replica with the fewest requests, of equals with the fewest programs; None: no fresh report."""
        fresh = [name for name in there if self.is_fresh(now_s, name)]
        return min(fresh, key=lambda name: (there[name].requests, self.homes[name], name), default=None)

    def _target(
        self, now_s: float, entry: FleetProgram, there: Mapping[ReplicaId, ReplicaState]
    ) -> ReplicaId | None:
        """Where the saved wait most exceeds the KV's cost, if it does by COST_FACTOR and MARGIN_S; else None.

        The program stays while a turn of it is in flight, or may be: home has not reported since the latest
        was sent.
        """
        home = there[entry.home]
        if entry.live or home.report.at_s <= entry.sent_s or not home.wait_s:
            return None
        cools = now_s - entry.moved_s < self.cooldown_s
        if cools or self.mover == "never" or not self.is_fresh(now_s, entry.home):
            return None
        gains_s = {
            name: home.wait_s - other.wait_s - COST_FACTOR * self._recompute_s(entry, other)
            for name, other in there.items()
            if name != entry.home and self.is_fresh(now_s, name)
        }
        best = max(gains_s, key=gains_s.__getitem__, default=None)
        return best if best is not None and gains_s[best] > MARGIN_S else None

    @staticmethod
    def _recompute_s(entry: FleetProgram, state: ReplicaState) -> float:
        """Seconds to compute the program's context there. A tier that replicas share may bring it sooner, but
        moves that count on that are slower (LOG.md)."""
        return state.report.prefill.seconds(entry.context_tokens, 0)

    def _send(
        self,
        there: Mapping[ReplicaId, ReplicaState],
        replica: ReplicaId,
        why: RouteReason,
        turns: int = 0,
        age_s: float = 0.0,
    ) -> Route:
        there[replica].sent += 1
        self.routes[why] += 1
        return Route(replica, why, turns, age_s)

    def _learn(self, now_s: float, replica: ReplicaId, known: KnownProgram) -> None:
        """A replica's word on a program. If two replicas know it, its home is the one with a turn of it, else
        the one that knows more turns."""
        entry = self.programs.get(known.program)
        if known.is_over:
            if entry is not None and entry.home == replica:
                self._forget(entry)
            return
        if entry is not None and entry.home != replica:
            if (known.live > 0, known.turns) <= (entry.live > 0, entry.turns):
                return
            self._settle(entry, replica)
        if entry is None:
            entry = self._add(now_s, known.program, replica)
            entry.moved_s = now_s  # it may have moved just before
        entry.arrival_s = min(entry.arrival_s, now_s - known.age_s)
        entry.turns, entry.context_tokens, entry.live = known.turns, known.context_tokens, known.live
        entry.seen_s = now_s
        self.programs.move_to_end(known.program)

    def _add(self, now_s: float, program: ProgramId, home: ReplicaId, turns: int = 0) -> FleetProgram:
        if len(self.programs) >= self.most_programs:
            self._forget(next(iter(self.programs.values())))
        entry = self.programs[program] = FleetProgram(program, home, now_s, now_s, turns)
        self.homes[home] += 1
        return entry

    def _settle(self, entry: FleetProgram, home: ReplicaId) -> None:
        """The program has another home."""
        self.homes[entry.home] -= 1
        self.homes[home] += 1
        entry.home, entry.live = home, 0

    def _forget(self, entry: FleetProgram) -> None:
        del self.programs[entry.id]
        self.homes[entry.home] -= 1

    def _forget_idle(self, now_s: float) -> None:
        while self.programs:
            entry = next(iter(self.programs.values()))
            if now_s - entry.seen_s < IDLE_S:
                return
            self._forget(entry)
