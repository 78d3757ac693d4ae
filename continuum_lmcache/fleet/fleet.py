"""A fleet of replicas: where each turn goes, and what moves. Owns that state.

Every event has its time as an argument. A host (an actor of Ray Serve, the simulator) passes on what replicas
report, and asks where each turn goes. Nothing waits here: each engine admits new programs for itself.

A turn goes to its program's home. Without one it goes to the least busy of LOOKS replicas, the next ones in
their circle, which is the program's home from then on. So what a turn costs does not grow with the replicas
or the programs.

A move saves waiting at home and costs the context's KV, which the other replica must compute. It is
considered as a turn arrives, between turns only, and only where replicas report a wait: engines that admit
programs themselves do not, since there moves gain nothing (docs/fleet.md). Nothing moves by old reports, and
no program moves twice within COOLDOWN_S, so thrash (several moves within it) is impossible.

What is known of a program comes from the replica that serves it (`on_report`), so a fleet that has lost its
state has it again once each replica has reported all its programs.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

from continuum_lmcache.errors import InvariantError
from continuum_lmcache.types import MOST_PROGRAMS, ProgramId

ReplicaId = NewType("ReplicaId", str)
LOOKS = 16  # replicas that are compared for a turn: all of a smaller fleet
MOVE_S = 10.0  # the wait that a move must save: more than most contexts take to compute
COOLDOWN_S = 30.0  # between two moves of a program, at least
REPORT_AGE_S = 3.0  # no new program, and no move, where the latest report is older
GONE_S = 60.0  # a replica without a report for so long is dropped; with its next report it is back
IDLE_S = 3600.0  # a program without a turn for so long is forgotten
PROGRAMS_A_REPLICA = 10_000  # known at a time, of a fleet of more than ten; of a smaller one MOST_PROGRAMS


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """One replica at one moment."""

    replica: ReplicaId
    requests: int = 0  # waiting and running ones
    wait_s: float | None = None  # of the prompt that has waited longest; None: the engine admits programs
    about: Mapping[str, int] = field(default_factory=dict)  # its rank and process, for the user


@dataclass(frozen=True, slots=True)
class KnownProgram:
    """A program, as a replica that served turns of it knows it."""

    program: ProgramId
    turns: int = 0  # finished, here and elsewhere
    age_s: float = 0.0  # since it arrived
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
    program_turns: int = 0  # finished: the engine holds no program back that has started
    program_age_s: float = 0.0


@dataclass(slots=True)
class FleetProgram:
    home: ReplicaId  # which may be gone
    arrival_s: float
    seen_s: float  # its latest turn began
    turns: int = 0  # finished
    is_live: bool = False  # a turn was sent, and home has not said that it ended
    moved_s: float = -math.inf


@dataclass(slots=True)
class ReplicaState:
    """One replica: its latest report, and what was sent there since."""

    report: ReplicaReport
    heard_s: float  # when the report came
    sent: int = 0  # turns

    @property
    def requests(self) -> int:
        return self.report.requests + self.sent

    def is_fresh(self, now_s: float) -> bool:
        """Whether the report is new enough for new programs and moves."""
        return now_s - self.heard_s <= REPORT_AGE_S


class Fleet:
    def __init__(self) -> None:
        self.replicas: OrderedDict[ReplicaId, ReplicaState] = OrderedDict()  # silent longest first
        self.programs: OrderedDict[ProgramId, FleetProgram] = OrderedDict()  # idle longest first
        self.homes: Counter[ReplicaId] = Counter()  # programs by home
        self.routes: Counter[RouteReason] = Counter()
        self._circle: list[ReplicaId] = []  # the replicas
        self._looked = -1  # place there of the one that was looked at last

    def on_report(self, now_s: float, report: ReplicaReport, programs: Iterable[KnownProgram] = ()) -> None:
        """A replica's report, with its programs that have changed; the first one adds the replica."""
        if report.replica not in self.replicas:
            self._circle.append(report.replica)
        self.replicas[report.replica] = ReplicaState(report, now_s)
        self.replicas.move_to_end(report.replica)
        for known in programs:
            self._learn(now_s, report.replica, known)
        while now_s - (silent := next(iter(self.replicas.values()))).heard_s > GONE_S:
            del self.replicas[silent.report.replica]
            self._circle.remove(silent.report.replica)
        while self.programs and now_s - next(iter(self.programs.values())).seen_s >= IDLE_S:
            self._forget(next(iter(self.programs)))

    def on_arrival(
        self, now_s: float, program: ProgramId | None, gone: Collection[str] = (), may_move: bool = True
    ) -> Route | None:
        """Where a turn goes that has arrived; None: there is no replica.

        `gone`: replicas that cannot be reached, though they may have reported. `may_move`: False for a turn
        that home alone can answer.
        """
        entry = self.programs.get(program) if program is not None else None
        why, replica = RouteReason.HOME, entry.home if entry is not None else None
        if entry is None or entry.home in gone or entry.home not in self.replicas:
            replica = self._least_busy(now_s, gone)
            why = RouteReason.FIRST if entry is None else RouteReason.REHOMED
        elif may_move and (better := self._better(now_s, entry, gone)) is not None:
            replica, why, entry.moved_s = better, RouteReason.MOVED, now_s
        if replica is None:
            return None
        if program is None:
            route = Route(replica, RouteReason.ALONE)
        else:
            entry = self._at_home(now_s, program, replica)
            entry.seen_s, entry.is_live = now_s, True
            self.programs.move_to_end(program)
            route = Route(replica, why, entry.turns, now_s - entry.arrival_s)
        self.replicas[replica].sent += 1
        self.routes[route.why] += 1
        return route

    def check(self) -> None:
        """Raise InvariantError unless the tables balance."""
        homes = Counter(entry.home for entry in self.programs.values())
        if homes != +self.homes:
            raise InvariantError(f"programs by home({homes}) != counted({self.homes})")
        if sorted(self._circle) != sorted(self.replicas):
            raise InvariantError(f"circle({self._circle}) != replicas({list(self.replicas)})")

    # -----------------------------------------------------------------------

    def _least_busy(self, now_s: float, gone: Collection[str]) -> ReplicaId | None:
        """The replica with the fewest requests, of equals with the fewest programs, of the next LOOKS with a
        fresh report; of all if none has one; None: there is none. None of `gone`."""
        found: list[ReplicaId] = []
        for _ in self._circle:
            self._looked = (self._looked + 1) % len(self._circle)
            name = self._circle[self._looked]
            if name not in gone and self.replicas[name].is_fresh(now_s):
                found.append(name)
            if len(found) == LOOKS:
                break
        found = found or [name for name in self._circle if name not in gone]
        return min(found, key=lambda name: (self.replicas[name].requests, self.homes[name]), default=None)

    def _better(self, now_s: float, entry: FleetProgram, gone: Collection[str]) -> ReplicaId | None:
        """A replica that saves a wait of MOVE_S. The program stays while another turn of it is in flight."""
        home = self.replicas[entry.home]
        here_s = home.report.wait_s if home.is_fresh(now_s) else None
        if entry.is_live or here_s is None or here_s <= MOVE_S or now_s - entry.moved_s < COOLDOWN_S:
            return None
        name = self._least_busy(now_s, gone)  # fresh as home, which is none of `gone`
        there_s = self.replicas[name].report.wait_s if name is not None else None
        return name if there_s is not None and here_s - there_s > MOVE_S else None

    def _learn(self, now_s: float, replica: ReplicaId, known: KnownProgram) -> None:
        """A replica's word on a program. If two replicas know it, its home is where its latest turn began."""
        before, began_s = self.programs.get(known.program), now_s - known.idle_s
        if known.is_over:
            if before is not None and before.home == replica:
                self._forget(known.program)
            return
        if before is not None and before.home != replica and began_s <= before.seen_s:
            return
        entry = self._at_home(now_s, known.program, replica)
        if before is None:
            entry.seen_s, entry.moved_s = began_s, now_s  # it may have moved just before
        entry.arrival_s, entry.turns = min(entry.arrival_s, now_s - known.age_s), known.turns
        entry.is_live = known.is_live or began_s < entry.seen_s  # or a turn is on its way there
        entry.seen_s = max(entry.seen_s, began_s)

    def _at_home(self, now_s: float, program: ProgramId, home: ReplicaId) -> FleetProgram:
        """The program, a new one if it is not known. Its home is there from now on."""
        entry = self.programs.get(program)
        if entry is None:
            if len(self.programs) >= max(MOST_PROGRAMS, PROGRAMS_A_REPLICA * len(self.replicas)):
                self._forget(next(iter(self.programs)))
            entry = self.programs[program] = FleetProgram(home, now_s, now_s)
        else:
            self.homes[entry.home] -= 1
        self.homes[home] += 1
        entry.home = home
        return entry

    def _forget(self, program: ProgramId) -> None:
        self.homes[self.programs.pop(program).home] -= 1
