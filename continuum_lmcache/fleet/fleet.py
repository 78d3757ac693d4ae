"""A fleet of replicas: where each turn goes, when a new program starts, what moves. Owns that state.

No clock, no I/O, no engine: every event has its time as an argument, every answer is a value. A host (an
actor of Ray Serve, the simulator) reports events (`on_*`) and executes the answers: `on_arrival` returns a
Route, Held or Refused, `admit` the Routes of turns that were Held.

Call `admit` after each event that may have made room, and at each report. A host that cannot be called
back may call `on_arrival` again for a turn that is Held: it gets its Route when its program is first in line
and fits. A turn that has its Route gets the same one again.

`program` is identity.program_id(job_id, tenant): ids of two tenants never collide. None: a request without a
program, which never waits. `prompt_tokens` may be an estimate; `on_pause` has the real number.
`claimed_turns` and `claimed_age_s` are the request's claims about a program that is unknown here. Pass only
trusted claims: with them a program skips the line (docs/settings.md, continuum.honor_program_age). A Route
has the same two values for the engine, `program_turns` and `program_age_s`: pass them on with each turn.

Where a turn goes:
    without a program                  to the replica with the fewest requests
    of a program with a home           home; elsewhere, if a mover decides so between turns (moves.py)
    of a program that lost its home    from the line, before all new ones; it waits max_rehome_s at most
    of a new program                   from the line (placement.py); Refused with a time if it has max_line
    of one that claims to have started to the replica of a keyed hash (homes.py)
      but is unknown here

Old reports: nothing moves from or to a replica whose report is older than move_age_s. No first turn goes to
one whose report is older than first_turn_age_s. Later turns still go home. If no report is new
enough, the hash also picks the replica of first turns: without reports a fleet is a hash ring, not an outage.

Memory: max_programs, of which those idle longest and without a live turn are dropped; max_line;
and the turns in flight, which the host bounds.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

from continuum_lmcache.config import parsed, refuse_unknown
from continuum_lmcache.errors import ConfigError, InvariantError
from continuum_lmcache.fleet.homes import hashed_replica
from continuum_lmcache.fleet.moves import MOVERS, Limits, Move, MoveCase, ReplicaOption, Stay, decide
from continuum_lmcache.fleet.placement import PendingTurn, Placement, ReplicaState
from continuum_lmcache.fleet.report import ReplicaId, ReplicaReport
from continuum_lmcache.types import ProgramId, TurnId

PREFIX = "fleet."
ABSENT_S = 300.0  # how long a program in a tool call counts: of published gaps 99 % end in 738 s


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Settings of a fleet. Times in seconds."""

    mover: str = "cost"  # a name of moves.MOVERS
    cooldown_s: float = 30.0  # moves.Limits has these three
    cost_factor: float = 2.0
    margin_s: float = 2.0
    max_line: int = 1000  # new programs that wait; more are refused
    max_wait_s: float = 120.0  # the longest wait of the first in line while it fits nowhere
    max_rehome_s: float = 5.0  # the same for a program that lost its replica
    move_age_s: float = 1.5  # three periods of half a second: nothing moves by older reports
    first_turn_age_s: float = 30.0  # no first turn goes to a replica with an older report
    max_programs: int = 100_000
    program_idle_s: float = 3600.0

    def __post_init__(self) -> None:
        if self.mover not in MOVERS:
            raise ConfigError(f"{PREFIX}mover is {self.mover!r}; it must be one of {', '.join(MOVERS)}")
        for each in fields(self):
            value = getattr(self, each.name)
            if not isinstance(value, str) and not (0 <= value < math.inf):
                raise ConfigError(f"{PREFIX}{each.name} is {value!r}; it must be a number >= 0")
        for name in ("max_line", "max_programs"):  # each new program is in the line, if only for a moment
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{PREFIX}{name} is {value!r}; it must be at least 1")

    @classmethod
    def load(cls, given: Mapping[str, Any]) -> FleetConfig:
        """From a mapping of names without a prefix. Raises ConfigError."""
        kinds = {each.name: str(each.type) for each in fields(cls)}
        refuse_unknown(given, kinds, PREFIX, "the fleet's settings")
        return cls(**{name: parsed(PREFIX + name, value, kinds[name]) for name, value in given.items()})

    @property
    def limits(self) -> Limits:
        return Limits(self.cooldown_s, self.cost_factor, self.margin_s)


class RouteReason(Enum):
    """Why a turn goes to its replica. Low cardinality: these are metric labels."""

    HOME = "home"
    FIRST = "first"  # its program starts there
    LET_IN = "let in"  # its program starts there, though its forecast does not fit
    MOVED = "moved"
    REHOMED = "rehomed"  # its program had lost its replica
    HASHED = "hashed"  # nothing else is known
    ALONE = "alone"  # a request without a program


@dataclass(frozen=True, slots=True)
class Route:
    """Send the turn there now."""

    turn: TurnId
    replica: ReplicaId
    why: RouteReason
    moved_from: ReplicaId | None = None
    program_turns: int = 0  # finished: for the engine
    program_age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Held:
    """The turn's program waits for room."""

    turn: TurnId
    since_s: float


@dataclass(frozen=True, slots=True)
class Refused:
    """The line is full: come again."""

    turn: TurnId
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class KnownProgram:
    """A program in a replica's report."""

    program: ProgramId
    turns: int  # finished
    context_tokens: int  # of the last finished turn
    age_s: float  # since it arrived
    live: tuple[TurnId, ...] = ()


@dataclass(slots=True)
class FleetProgram:
    """A program that the fleet knows."""

    id: ProgramId
    arrival_s: float
    seen_s: float
    turns: int = 0  # finished
    context_tokens: int = 0  # of the last finished turn
    home: ReplicaId | None = None  # None: none yet, or lost
    live: set[TurnId] = field(default_factory=set)  # sent to a replica
    has_started: bool = False  # a turn of it was sent
    moved_s: float = -math.inf


@dataclass(frozen=True, slots=True)
class SentTurn:
    """A turn that was sent."""

    program: ProgramId  # a request without a program gets a unique name
    route: Route


class Fleet:
    """Replicas, programs and turns. `key`: 1 to 64 bytes, the same wherever the hashes must be equal."""

    def __init__(self, config: FleetConfig, key: bytes) -> None:
        self.config, self._key, self._limits = config, key, config.limits
        self.placement = Placement(config.max_wait_s, config.max_rehome_s, config.first_turn_age_s)
        self.programs: OrderedDict[ProgramId, FleetProgram] = OrderedDict()  # idle longest first
        self.turns: dict[TurnId, SentTurn] = {}
        self.waiting: dict[TurnId, ProgramId] = {}  # turns in the line
        self.routes: Counter[RouteReason] = Counter()
        self.stays: Counter[str] = Counter()  # later turns that could have moved, by why they did not
        self.refused = 0
        self.forgotten = 0
        self.thrash = 0  # moves within cooldown_s of the program's last one; must stay 0

    # replicas --------------------------------------------------------------

    def on_replica_join(self, now_s: float, report: ReplicaReport) -> None:
        """A replica is there. It gets first turns, and no program that has a home. For a known replica this
        is only a report."""
        if report.replica in self.placement.replicas:
            self.on_report(now_s, report)
        else:
            state = self.placement.add_replica(report)
            state.turns |= {t for t, live in self.turns.items() if live.route.replica == report.replica}

    def on_report(self, now_s: float, report: ReplicaReport) -> None:
        """A replica's report, unless a newer one is here, or the replica is not known."""
        state = self.placement.replicas.get(report.replica)
        if state is not None and report.at_s >= state.report.at_s:
            state.apply_report(report)
            state.admission.expire_absent(now_s)  # a few at a time, so that no first turn waits for many
        self._forget_idle(now_s)

    def on_replica_drain(self, replica: ReplicaId) -> None:
        """It drains: its programs have no home any more; its turns may end."""
        if self.placement.replicas.pop(replica, None) is None:
            return
        for program in self.programs.values():
            if program.home == replica:
                program.home = None

    def on_replica_death(self, now_s: float, replica: ReplicaId) -> None:
        """It is gone with all turns that were sent there. Their programs keep their age."""
        self.on_replica_drain(replica)
        for turn in [turn for turn, live in self.turns.items() if live.route.replica == replica]:
            self._end_turn(now_s, turn)

    def restore(self, now_s: float, replica: ReplicaId, programs: Iterable[KnownProgram]) -> None:
        """Add a replica's programs to a fleet that has just started. If two replicas know a program, its
        home is the one with a turn of it, else the one that knows more turns. Turns of it that wait in the
        line go there."""
        state = self.placement.replicas.get(replica)
        if state is None:
            return
        for known in programs:
            entry = self.programs.get(known.program)
            if entry is not None and (bool(known.live), known.turns) <= (bool(entry.live), entry.turns):
                continue
            if entry is not None and entry.home in self.placement.replicas:
                self.placement.replicas[entry.home].admission.remove_program(known.program)
            if entry is None:
                entry = self._add_program(now_s, known.program, known.age_s)
            entry.turns, entry.context_tokens, entry.home = known.turns, known.context_tokens, replica
            entry.arrival_s = min(entry.arrival_s, now_s - known.age_s)
            entry.moved_s = now_s  # it may have moved just before
            for turn in known.live:
                if turn not in self.turns and turn not in self.waiting:
                    self._send(now_s, entry, turn, known.context_tokens, RouteReason.HOME)
                    state.on_first_token(turn)
            for turn, prompt_tokens in self.placement.waiting_turns(known.program).items():
                del self.waiting[turn]
                self.placement.remove_from_line(known.program, turn)
                self._send(now_s, entry, turn, prompt_tokens, RouteReason.HOME)
        self._forget_surplus(self.config.max_programs)

    # turns -----------------------------------------------------------------

    def on_arrival(
        self,
        now_s: float,
        turn: TurnId,
        program: ProgramId | None,
        prompt_tokens: int,
        claimed_turns: int = 0,
        claimed_age_s: float = 0.0,
    ) -> Route | Held | Refused:
        """A turn arrived: where it goes, or that it waits. May be called again for a turn that is here."""
        if (live := self.turns.get(turn)) is not None:
            return live.route
        if turn in self.waiting:
            return self._retry(now_s, turn)
        if program is None:
            return self._route_anonymous(now_s, turn, prompt_tokens)
        entry = self.programs.get(program)
        if entry is None:
            if not claimed_turns and self.placement.new_programs >= self.config.max_line:
                self.refused += 1
                return Refused(turn, self.placement.retry_after_s(now_s))
            entry = self._add_program(now_s, program, claimed_age_s, claimed_turns)
            if claimed_turns and self.placement.replicas:
                entry.home = hashed_replica(program, self.placement.replicas, self._key)
                return self._send(now_s, entry, turn, prompt_tokens, RouteReason.HASHED)
        self._touch(now_s, entry)
        if entry.home is not None:
            return self._route_later_turn(now_s, entry, turn, prompt_tokens)
        age_s = now_s - entry.arrival_s
        done = max(entry.turns, int(entry.has_started))
        self.placement.add_to_line(now_s, program, turn, prompt_tokens, age_s, done)
        self.waiting[turn] = program
        return self._retry(now_s, turn)

    def admit(self, now_s: float) -> tuple[Route, ...]:
        """Start programs of the line for which there is room, in order, with all their turns."""
        found: list[Route] = []
        while (started := self._start_first(now_s)) is not None:
            found += started
        return tuple(found)

    def on_first_token(self, turn: TurnId) -> None:
        """The turn's prefill has ended."""
        if (live := self.turns.get(turn)) is not None and (state := self._state_of(live)) is not None:
            state.on_first_token(turn)

    def on_pause(self, now_s: float, turn: TurnId, context_tokens: int) -> None:
        """The turn ended in a tool call, with a context of this many tokens, prompt and output."""
        if (live := self._end_turn(now_s, turn)) is None:
            return
        entry, state = self.programs.get(live.program), self._state_of(live)
        if entry is None:
            if state is not None:
                state.admission.remove_program(live.program)
            return
        entry.turns += 1
        entry.context_tokens = context_tokens
        if state is not None and entry.home == live.route.replica:
            state.admission.on_pause(now_s, entry.id, context_tokens, ABSENT_S)

    def on_last_turn_end(self, now_s: float, turn: TurnId) -> None:
        """The turn ended, and was its program's last. A program with other turns continues."""
        if (live := self._end_turn(now_s, turn)) is None:
            return
        entry, state = self.programs.get(live.program), self._state_of(live)
        if entry is not None:
            entry.turns += 1
            if entry.live or entry.id in self.placement.line:
                if state is not None:
                    state.admission.remove_turn(entry.id)
                return
            self._forget(entry, entry.turns)
        elif state is not None:
            state.admission.remove_program(live.program)

    def on_abort(self, now_s: float, turn: TurnId) -> None:
        """The turn is gone, unfinished, perhaps while it was in the line. Its program may continue."""
        if (program := self.waiting.pop(turn, None)) is not None:
            self.placement.remove_from_line(program, turn)
            self._forget_if_unused(program)
        elif (live := self._end_turn(now_s, turn)) is not None:
            if (state := self._state_of(live)) is not None:
                state.admission.remove_turn(live.program)
            self._forget_if_unused(live.program)

    # answers ---------------------------------------------------------------

    def home(self, program: ProgramId) -> ReplicaId | None:
        """The replica of the program's turns; None: it has no home, or is not known."""
        entry = self.programs.get(program)
        return entry.home if entry is not None else None

    def has_started(self, turn: TurnId) -> bool:
        """Whether the program of a turn in the line has started: it lost its replica."""
        return bool(self.placement.line[self.waiting[turn]].finished)

    def line_wait_s(self, now_s: float) -> float:
        """How long the first in line has waited; 0: the line is empty."""
        head = self.placement.head()
        return now_s - head.since_s if head is not None else 0.0

    def check(self) -> None:
        """Raise InvariantError unless the tables balance."""
        self.placement.check()
        replicas = self.placement.replicas
        sent = Counter(live.route.replica for live in self.turns.values())
        for replica, state in replicas.items():
            if sent[replica] != len(state.turns) or not state.turns <= self.turns.keys():
                raise InvariantError(f"turns at {replica!r}({len(state.turns)}) != sent({sent[replica]})")
            inside = {p for p in state.admission.admitted if p in self.programs}
            if wrong := [p for p in inside if self.programs[p].home != replica]:
                raise InvariantError(f"programs {wrong!r} count at {replica!r}, which is not their home")
        for entry in self.programs.values():
            if entry.home is not None and entry.home not in replicas:
                raise InvariantError(f"program {entry.id!r} has the home {entry.home!r}, which is gone")
            if entry.home is not None and entry.id in self.placement.line:
                raise InvariantError(f"program {entry.id!r} has the home {entry.home!r} and is in the line")
            is_known = entry.home or entry.has_started or entry.turns or entry.id in self.placement.line
            if not is_known:
                raise InvariantError(f"program {entry.id!r} has no home, did not start, is in no line")
        live = {turn for entry in self.programs.values() for turn in entry.live}
        if not live <= self.turns.keys():
            raise InvariantError(f"live turns of programs({len(live)}) are not all sent")
        queued = {turn: w.program for w in self.placement.line.values() for turn in w.turns}
        if queued != self.waiting or queued.keys() & self.turns.keys():
            raise InvariantError(f"turns in line({len(queued)}) != turns that wait({len(self.waiting)})")
        if self.placement.new_programs > self.config.max_line:
            raise InvariantError(f"line({self.placement.new_programs}) > max_line({self.config.max_line})")
        if self.thrash:
            raise InvariantError(f"thrash({self.thrash}) != 0")

    # -----------------------------------------------------------------------

    def _route_anonymous(self, now_s: float, turn: TurnId, prompt_tokens: int) -> Route | Refused:
        if not self.placement.replicas:
            self.refused += 1
            return Refused(turn, self.placement.retry_after_s(now_s))
        replica = self.placement.least_busy(self.placement.replicas.values())
        alone = ProgramId(f"~{turn}")
        self.placement.replicas[replica].admission.add_request(alone, prompt_tokens)
        return self._sent(turn, alone, Route(turn, replica, RouteReason.ALONE), prompt_tokens, 0)

    def _route_later_turn(self, now_s: float, entry: FleetProgram, turn: TurnId, prompt_tokens: int) -> Route:
        home = entry.home
        assert home is not None
        if len(self.placement.replicas) > 1 and not entry.live:
            answer = self._decide_move(now_s, entry, prompt_tokens)
            if isinstance(answer, Move):
                return self._move(now_s, entry, turn, prompt_tokens, answer.to)
            self.stays[answer.reason] += 1
        return self._send(now_s, entry, turn, prompt_tokens, RouteReason.HOME)

    def _decide_move(self, now_s: float, entry: FleetProgram, prompt_tokens: int) -> Move | Stay:
        """Whether the program, which is between turns, should move."""
        replicas = self.placement.replicas
        assert entry.home is not None
        home = self._option(now_s, entry, replicas[entry.home], prompt_tokens, is_home=True)
        if not home.wait_s:
            return Stay("no-wait")
        others = [
            self._option(now_s, entry, p, prompt_tokens) for r, p in replicas.items() if r != entry.home
        ]
        return decide(self.config.mover, MoveCase(home, others, now_s - entry.moved_s), self._limits)

    def _option(
        self,
        now_s: float,
        entry: FleetProgram,
        state: ReplicaState,
        prompt_tokens: int,
        is_home: bool = False,
    ) -> ReplicaOption:
        """A replica as the program's next turn would find it. Away from home it computes the context: a tier
        that replicas share, or a link, may bring it, but moves that count on that are slower (LOG.md)."""
        is_fresh = state.age_s(now_s) <= self.config.move_age_s
        costs, context_tokens = state.report.costs, entry.context_tokens
        return ReplicaOption(
            state.report.replica,
            state.wait_s(is_fresh),
            self._recompute_s(state, context_tokens) if is_home else costs.prefill_s(context_tokens),
            is_home or (is_fresh and state.fits(prompt_tokens, max(1, entry.turns))),
            is_fresh,
        )

    def _recompute_s(self, state: ReplicaState, context_tokens: int) -> float:
        """Seconds to compute a context again at home, for the part that it has probably lost."""
        kept_tokens = int(context_tokens * state.kept_share)
        if kept_tokens == context_tokens:
            return 0.0
        return state.report.costs.prefill_s(context_tokens - kept_tokens, kept_tokens)

    def _move(
        self, now_s: float, entry: FleetProgram, turn: TurnId, prompt_tokens: int, to: ReplicaId
    ) -> Route:
        old = entry.home
        assert old is not None
        self.placement.replicas[old].admission.remove_program(entry.id)
        self.thrash += now_s - entry.moved_s < self.config.cooldown_s
        entry.home, entry.moved_s = to, now_s
        self.placement.replicas[to].reserve(now_s, prompt_tokens, max(1, entry.turns))
        return self._send(now_s, entry, turn, prompt_tokens, RouteReason.MOVED, old)

    def _retry(self, now_s: float, turn: TurnId) -> Route | Held:
        """A turn in the line: its program starts, if it is first and there is room."""
        waiting = self.placement.line[self.waiting[turn]]
        if self.placement.head() is waiting:
            self._start_first(now_s)
        live = self.turns.get(turn)
        return live.route if live is not None else Held(turn, waiting.since_s)

    def _start_first(self, now_s: float) -> list[Route] | None:
        """Start the first in line, with all its turns; None: none starts."""
        waiting = self.placement.head()
        replicas = self.placement.replicas
        if waiting is None or not replicas:
            return None
        for state in replicas.values():
            state.admission.expire_absent(now_s)
        choice = self.placement.choose_replica(now_s, waiting)
        why = RouteReason.REHOMED if waiting.finished else RouteReason.FIRST
        if choice is None:
            if any(p.age_s(now_s) <= self.config.first_turn_age_s for p in replicas.values()):
                return None
            choice, why = (hashed_replica(waiting.program, replicas, self._key), False), RouteReason.HASHED
        replica, fits = choice
        if why is RouteReason.FIRST and not fits:
            why = RouteReason.LET_IN
        self.placement.start(now_s, waiting, replica)
        entry = self.programs[waiting.program]
        entry.home = replica
        found = []
        for turn, prompt_tokens in waiting.turns.items():
            del self.waiting[turn]
            found.append(self._sent(turn, entry.id, self._route(now_s, entry, turn, why), prompt_tokens, 0))
            entry.live.add(turn)
        entry.has_started = True
        return found

    def _send(
        self,
        now_s: float,
        entry: FleetProgram,
        turn: TurnId,
        prompt_tokens: int,
        why: RouteReason,
        moved_from: ReplicaId | None = None,
    ) -> Route:
        """The turn goes to its program's home."""
        assert entry.home is not None
        admission = self.placement.replicas[entry.home].admission
        admission.on_arrival(now_s, entry.id, prompt_tokens, turns=max(1, entry.turns))
        kept_share = self.placement.replicas[entry.home].kept_share
        held_tokens = int(entry.context_tokens * kept_share) if why is RouteReason.HOME else 0
        entry.live.add(turn)
        entry.has_started = True
        route = replace(self._route(now_s, entry, turn, why), moved_from=moved_from)
        return self._sent(turn, entry.id, route, prompt_tokens, held_tokens)

    def _route(self, now_s: float, entry: FleetProgram, turn: TurnId, why: RouteReason) -> Route:
        assert entry.home is not None
        age_s = now_s - entry.arrival_s
        return Route(turn, entry.home, why, program_turns=entry.turns, program_age_s=age_s)

    def _sent(
        self, turn: TurnId, program: ProgramId, route: Route, prompt_tokens: int, held_tokens: int
    ) -> Route:
        """The turn was sent. The replica is assumed to hold `held_tokens` of its prompt."""
        state = self.placement.replicas[route.replica]
        there_tokens = min(held_tokens, prompt_tokens)
        tokens = prompt_tokens - there_tokens
        seconds = state.report.costs.prefill_s(tokens, there_tokens)
        state.add_turn(turn, PendingTurn(tokens, seconds, is_first=not route.program_turns))
        self.turns[turn] = SentTurn(program, route)
        self.routes[route.why] += 1
        return route

    def _end_turn(self, now_s: float, turn: TurnId) -> SentTurn | None:
        live = self.turns.pop(turn, None)
        if live is None:
            return None
        if (state := self._state_of(live)) is not None:
            state.remove_turn(turn)
        if (entry := self.programs.get(live.program)) is not None:
            entry.live.discard(turn)
            self._touch(now_s, entry)
        return live

    def _state_of(self, live: SentTurn) -> ReplicaState | None:
        """The replica that the turn was sent to, if it is there."""
        return self.placement.replicas.get(live.route.replica)

    def _add_program(self, now_s: float, program: ProgramId, age_s: float, turns: int = 0) -> FleetProgram:
        self._forget_surplus(self.config.max_programs - 1)
        entry = self.programs[program] = FleetProgram(program, now_s - age_s, now_s, turns)
        return entry

    def _touch(self, now_s: float, entry: FleetProgram) -> None:
        entry.seen_s = now_s
        self.programs.move_to_end(entry.id)

    def _forget_if_unused(self, program: ProgramId) -> None:
        """Drop a program without a finished turn and without a live one."""
        entry = self.programs.get(program)
        if entry is not None and not (entry.live or entry.turns or program in self.placement.line):
            self._forget(entry, 0)

    def _forget(self, entry: FleetProgram, finished_turns: int) -> None:
        del self.programs[entry.id]
        if entry.home is not None:
            self.placement.replicas[entry.home].admission.remove_program(entry.id, finished_turns)

    def _forget_surplus(self, most: int) -> None:
        """Drop programs beyond `most`, those idle longest and without a live turn first."""
        surplus = len(self.programs) - most
        if surplus > 0:
            idle = (p for p in self.programs.values() if not (p.live or p.id in self.placement.line))
            for entry in list(itertools.islice(idle, surplus)):
                self.forgotten += 1
                self._forget(entry, 0)

    def _forget_idle(self, now_s: float) -> None:
        self._forget_surplus(self.config.max_programs)
        while self.programs:
            entry = next(iter(self.programs.values()))
            if (
                now_s - entry.seen_s < self.config.program_idle_s
                or entry.live
                or entry.id in self.placement.line
            ):
                return
            self._forget(entry, 0)
