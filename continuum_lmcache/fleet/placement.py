"""Where new programs start, and when: one line in front of all replicas.

A program starts where its forecast fits beside all reservations, on the replica with the fewest requests
among those. While it fits nowhere, it waits and holds no memory. The arithmetic is the engine's
own (controller.py): one AdmissionController for each replica, and one ContextGrowth for all, so a replica
that has just joined uses what the others have learned. Where the engine reports its headroom, that value is
used instead, since the engine knows shared heads and requests that did not come through this fleet.

Started programs that lost their replica are in the same line, before all new ones, oldest first.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from continuum_lmcache.admission.context_growth import ContextGrowth
from continuum_lmcache.admission.controller import AdmissionController, KVCapacity, PendingProgram
from continuum_lmcache.errors import InvariantError
from continuum_lmcache.fleet.report import ReplicaId, ReplicaReport
from continuum_lmcache.types import ProgramId, TurnId

RATE_STARTS = 64  # latest starts from the line, for its speed
LEAST_RETRY_S = 1.0
MAX_RESERVATIONS = 1024  # since one report, whose period is half a second


@dataclass(frozen=True, slots=True)
class PendingTurn:
    """A turn without its first token."""

    tokens: int  # to be computed, as far as is known
    seconds: float  # for these on an idle replica
    is_first: bool  # of its program


@dataclass(slots=True)
class ReplicaState:
    """One replica: its latest report, and what was sent there since."""

    report: ReplicaReport
    admission: AdmissionController
    turns: set[TurnId] = field(default_factory=set)  # live
    pending: dict[TurnId, PendingTurn] = field(default_factory=dict)  # of these
    reserved: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MAX_RESERVATIONS))

    @property
    def requests(self) -> int:
        """Live ones: those sent there or those it reports, whichever are more (as vLLM's balancer counts)."""
        return max(len(self.turns), self.report.requests)

    @property
    def pending_tokens(self) -> int:
        """Tokens of prompts that wait there or are being computed."""
        return sum(pending.tokens for pending in self.pending.values())

    def age_s(self, now_s: float) -> float:
        return max(0.0, now_s - self.report.at_s)

    def wait_s(self, is_fresh: bool) -> float:
        """What a later turn would wait there before its prompt is computed, seconds.

        The time of what is known to be pending before it; or the wait of such turns there now, if longer:
        then the replica is slower than its report, or short of memory.
        """
        before = (p for p in self.pending.values() if not (p.is_first and self.report.returning_first))
        known_s = sum(pending.seconds for pending in before)
        return max(known_s, self.report.oldest_returning_wait_s if is_fresh else 0.0)

    def apply_report(self, report: ReplicaReport) -> None:
        self.report = report
        self.admission.capacity = KVCapacity(report.gpu_tokens, report.tier_tokens)
        while self.reserved and self.reserved[0][0] <= report.at_s:
            self.reserved.popleft()

    def reserve(self, now_s: float, prompt_tokens: int, turns: int) -> None:
        """A program that has finished `turns` goes there, which the next report will count."""
        self.reserved.append((now_s, self.admission.growth.forecast_tokens(prompt_tokens, turns)))

    def headroom_tokens(self) -> float:
        """The largest forecast for which there is room."""
        if self.report.headroom_tokens is None:
            return self.admission.headroom_tokens
        return self.report.headroom_tokens - sum(tokens for _, tokens in self.reserved)

    @property
    def kept_share(self) -> float:
        """The share of its programs' contexts that it probably still holds, 0 to 1.

        Stock vLLM does not report it: of contexts for which there is no room, the part that fits.
        """
        if self.report.headroom_tokens is not None:
            return 1.0  # the engine's own admission ensures it
        over_tokens = max(0.0, -self.admission.headroom_tokens)
        return self.report.gpu_tokens / (self.report.gpu_tokens + over_tokens) if over_tokens else 1.0

    def fits(self, prompt_tokens: int, turns: int) -> bool:
        """Whether a program with `turns` finished turns has room, and no program waits for room there."""
        if self.report.headroom_tokens is None:
            return self.admission.fits(prompt_tokens, turns)
        need = self.admission.growth.forecast_tokens(prompt_tokens, turns)
        return not self.report.pending_programs and need <= self.headroom_tokens()

    def add_turn(self, turn: TurnId, pending: PendingTurn) -> None:
        self.turns.add(turn)
        self.pending[turn] = pending

    def on_first_token(self, turn: TurnId) -> None:
        self.pending.pop(turn, None)

    def remove_turn(self, turn: TurnId) -> None:
        self.on_first_token(turn)
        self.turns.discard(turn)

    def check(self) -> None:
        """Raise InvariantError unless its tables balance."""
        self.admission.check()
        if not self.pending.keys() <= self.turns:
            raise InvariantError(f"turns without their first token({len(self.pending)}) are not all live")


@dataclass(slots=True)
class WaitingProgram:
    """A program in the line."""

    program: ProgramId
    since_s: float
    arrival_s: float  # of the program
    turns: dict[TurnId, int]  # waiting ones, with the tokens of their prompts
    finished: int = 0  # turns; more than 0: it has started, and lost its replica
    head_since_s: float = math.inf  # when it became the first in line

    @property
    def prompt_tokens(self) -> int:
        """Of its longest turn here."""
        return max(self.turns.values())


@dataclass(slots=True)
class Placement:
    """The replicas, and the one line in front of them. `max_wait_s`: how long the first in line waits at
    most while it fits nowhere; `max_rehome_s`: the same for a started program."""

    max_wait_s: float
    max_rehome_s: float
    first_turn_age_s: float  # no first turn goes to a replica with an older report
    growth: ContextGrowth = field(default_factory=ContextGrowth)
    replicas: dict[ReplicaId, ReplicaState] = field(default_factory=dict)
    line: dict[ProgramId, WaitingProgram] = field(default_factory=dict)
    _starts: deque[float] = field(default_factory=lambda: deque(maxlen=RATE_STARTS))

    def add_replica(self, report: ReplicaReport) -> ReplicaState:
        capacity = KVCapacity(report.gpu_tokens, report.tier_tokens)
        admission = AdmissionController(capacity, self.max_wait_s, growth=self.growth)
        state = self.replicas[report.replica] = ReplicaState(report, admission)
        return state

    def add_to_line(
        self, now_s: float, program: ProgramId, turn: TurnId, tokens: int, age_s: float, done: int
    ) -> None:
        """Add a turn of a program without a home to the line, or to its program's place there. `age_s`: since
        the program arrived; `done`: turns it has finished."""
        if (waiting := self.line.get(program)) is not None:
            waiting.turns[turn] = tokens
            return
        self.line[program] = WaitingProgram(program, now_s, now_s - age_s, {turn: tokens}, done)
        if not done:
            self.growth.add_first_prompt(tokens)

    def remove_from_line(self, program: ProgramId, turn: TurnId) -> None:
        waiting = self.line[program]
        del waiting.turns[turn]
        if not waiting.turns:
            del self.line[program]

    def waiting_turns(self, program: ProgramId) -> dict[TurnId, int]:
        """The program's turns in the line, with the tokens of their prompts."""
        return dict(self.line[program].turns) if program in self.line else {}

    @property
    def new_programs(self) -> int:
        """Programs in the line that have no finished turn."""
        return sum(not waiting.finished for waiting in self.line.values())

    def head(self) -> WaitingProgram | None:
        """The first in line: started programs before new ones, then the oldest."""
        return min(self.line.values(), key=lambda w: (not w.finished, w.arrival_s), default=None)

    def choose_replica(self, now_s: float, waiting: WaitingProgram) -> tuple[ReplicaId, bool] | None:
        """Where the first in line may start now, and whether it fits there; None: it waits."""
        waiting.head_since_s = min(waiting.head_since_s, now_s)
        tokens, done = waiting.prompt_tokens, waiting.finished
        recent = [p for p in self.replicas.values() if p.age_s(now_s) <= self.first_turn_age_s]
        fitting = [p for p in recent if p.fits(tokens, done)]
        if fitting:
            return self.least_busy(fitting), True
        if idle := [p for p in recent if not p.requests]:
            return self.least_busy(idle), False
        # of the one that waits longest: older ones that came later are before it
        since_s = min((w.since_s for w in self.line.values() if w.finished), default=math.inf)
        rehome_is_due = now_s - since_s >= self.max_rehome_s
        if recent and (rehome_is_due or now_s - waiting.head_since_s >= self.max_wait_s):
            return self.least_busy(recent), False
        return None

    def start(self, now_s: float, waiting: WaitingProgram, replica: ReplicaId) -> None:
        """Remove the program from the line; all its turns go to this replica."""
        del self.line[waiting.program]
        self._starts.append(now_s)
        state = self.replicas[replica]
        tokens, done = waiting.prompt_tokens, waiting.finished
        state.reserve(now_s, tokens, done)
        if done:
            for prompt_tokens in waiting.turns.values():
                state.admission.on_arrival(now_s, waiting.program, prompt_tokens, turns=done)
        else:
            pending = PendingProgram(waiting.program, tokens, 0, waiting.since_s, turns=len(waiting.turns))
            state.admission.start_program(pending)

    def least_busy(self, states: Iterable[ReplicaState]) -> ReplicaId:
        """Of these, one or more, the replica with the fewest requests; of equals the one with most room."""
        best = min(states, key=lambda p: (p.requests, -p.headroom_tokens(), p.report.replica))
        return best.report.replica

    def retry_after_s(self, now_s: float) -> float:
        """How long the present line takes at its latest speed: 1 s to max_wait_s."""
        if len(self._starts) < 2 or now_s <= self._starts[0]:
            return max(LEAST_RETRY_S, self.max_wait_s)
        a_start_s = (now_s - self._starts[0]) / len(self._starts)
        return max(LEAST_RETRY_S, min(self.max_wait_s, len(self.line) * a_start_s))

    def check(self) -> None:
        """Raise InvariantError unless the line has exactly its programs."""
        for state in self.replicas.values():
            state.check()
        if empty := [program for program, waiting in self.line.items() if not waiting.turns]:
            raise InvariantError(f"programs {empty!r} are in the line without a turn")
