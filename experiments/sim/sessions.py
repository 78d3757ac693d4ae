"""The closed loops in the simulator: N live sessions for a time, or N workers for a batch of programs.

Sessions follow AgentX's rules (experiments/sessions.py): when all have had their warm-up turns, each goes on
with the gap before its next turn, and time counts from then.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm.v1.request import Request, RequestStatus

from experiments.sessions import LOAD_IDLE_S, WARM_UP_TURNS, SessionTurn, played, warming
from experiments.sim.agents import Agents, LiveProgram
from experiments.sim.clock import Timetable, VirtualClock
from experiments.sim.engine import Simulation, schedulers
from experiments.sim.result import JobResult, Result
from experiments.sim.serving import Setup
from experiments.sim.streams import History
from experiments.workload import Program


class SessionAgents(Agents):
    """`sessions` clients; each plays the programs that `programs_of` yields for it, until these end."""

    def __init__(
        self,
        setup: Setup,
        clock: VirtualClock,
        timetable: Timetable,
        send: Callable[[Request], None],
        sessions: int,
        programs_of: Callable[[int], Iterator[tuple[Program, int]]],
        warm_up_turns: int = 0,  # of each session, before any goes on
    ) -> None:
        super().__init__((), setup, clock, timetable, send)
        self.warm_up_turns = warm_up_turns
        self.sent: Counter[int] = Counter()  # turns, by session
        self.held: list[tuple[LiveProgram, float]] = []  # sessions that are warm, with the gap before them
        self.counts_from_s: float | None = None if warm_up_turns else 0.0
        self.sessions, self.programs_of = sessions, [programs_of(session) for session in range(sessions)]
        self.played: list[SessionTurn] = []
        self.live: dict[str, SessionTurn] = {}  # by request
        self.session_of: dict[str, int] = {}  # by program, of the live ones
        self.are_gone = False
        self._setup = setup
        for session in range(sessions):
            self._next_program(session)

    @property
    def done(self) -> bool:
        """Whether no session has anything to do any more."""
        return not self.session_of

    def hear(self, said: Any) -> None:
        live = self.asked[said.request_id]
        turn = self.live[said.request_id]
        turn.heard(self.clock.now_s, len(said.new_token_ids))
        super().hear(said)
        if said.finish_reason is not None:
            del self.live[said.request_id]
            if live.turn == len(live.program.turns):
                self._next_program(self.session_of.pop(live.program.program_id))
            if not self.asked and math.isfinite(idle_s := self.timetable.next_s - self.clock.now_s):
                self.timetable.bring_forward(max(0.0, idle_s - LOAD_IDLE_S))

    @property
    def ended(self) -> list[JobResult]:
        return list(self.jobs.values())

    def leave(self) -> None:
        """All clients leave: nothing more is sent."""
        self.are_gone = True
        self.session_of.clear()

    def _next_program(self, session: int) -> None:
        program, start = next(self.programs_of[session], (None, 0))
        if program is None or self.are_gone:
            return
        self.session_of[program.program_id] = session
        live = LiveProgram(program, History(self.streams, self._setup.shared_tokens), turn=start)
        live.started_s = self.clock.now_s
        self._rest(live, 0.0)

    def _rest(self, live: LiveProgram, gap_s: float) -> None:
        session = self.session_of[live.program.program_id]
        if self.counts_from_s is not None or self.sent[session] < self.warm_up_turns:
            super()._rest(live, gap_s)
            return
        self.held.append((live, gap_s))
        if len(self.held) == self.sessions:
            self.counts_from_s = self.clock.now_s
            for warm, before_s in self.held:
                super()._rest(warm, before_s)
            self.held.clear()

    def _submit(self, live: LiveProgram) -> None:
        if self.are_gone:
            return
        name, session = live.program.program_id, self.session_of[live.program.program_id]
        of_turns, asked = len(live.program.turns), live.spec.output_tokens
        turn = SessionTurn(session, name, live.turn + 1, of_turns, asked, self.clock.now_s)
        self.sent[session] += 1
        self.live[live.request_id] = turn
        self.played.append(turn)
        super()._submit(live)


class ClosedLoop(Simulation):
    """One engine with sessions that never end by themselves, or with the workers of a batch."""

    agents: SessionAgents

    def run_for(self, counted_s: float) -> None:
        """Run so long after the warm-up, or until no session has a program. Then the clients leave."""
        self.advance_while(lambda: not (self.agents.done or self._is_over(counted_s)))
        self.agents.leave()
        if self.gate is not None:
            self.gate.close()
        scheduler = self.engines[0].scheduler
        scheduler.finish_requests(list(scheduler.requests), RequestStatus.FINISHED_ABORTED)
        self.advance_while(lambda: bool(scheduler.requests))  # loads that are under way
        self.drain()

    def _is_over(self, counted_s: float) -> bool:
        from_s = self.agents.counts_from_s
        return from_s is not None and self.clock.now_s >= from_s + counted_s


@dataclass(frozen=True, slots=True)
class Played:
    """What a closed loop gave."""

    turns: Sequence[SessionTurn]
    result: Result  # its jobs: the programs that ended
    start_s: float  # of what counts
    end_s: float


def play(
    pool: Sequence[Program],
    setup: Setup,
    sessions: int,
    seed: int,
    counted_s: float,
    warm_up_turns: int = WARM_UP_TURNS,
) -> Played:
    """`sessions` live sessions, for so long after each had its `warm_up_turns`.

    Raises TraceError and InvariantError, as simulate() does.
    """

    def programs_of(session: int) -> Iterator[tuple[Program, int]]:
        return warming(played(pool, session, seed), warm_up_turns)

    return _run(pool, setup, sessions, programs_of, counted_s, warm_up_turns)


def play_batch(programs: Sequence[Program], setup: Setup, workers: int) -> Played:
    """All programs, each whole and once; a worker that is free takes the next one."""
    left = deque(programs)

    def taken(_worker: int) -> Iterator[tuple[Program, int]]:
        while left:
            yield left.popleft(), 0

    return _run(programs, setup, workers, taken, math.inf)


def _run(
    pool: Sequence[Program],
    setup: Setup,
    sessions: int,
    programs_of: Callable[[int], Iterator[tuple[Program, int]]],
    counted_s: float,
    warm_up_turns: int = 0,
) -> Played:
    with schedulers(setup, pool) as (made, clock):
        agents = partial(
            SessionAgents, sessions=sessions, programs_of=programs_of, warm_up_turns=warm_up_turns
        )
        loop = ClosedLoop(agents, setup, made, clock)
        loop.run_for(counted_s)
        turns, start_s = loop.agents.played, loop.agents.counts_from_s or 0.0
        end_s = min(start_s + counted_s, max(t.last_s or 0.0 for t in turns))
        return Played(turns, loop.result(), start_s, end_s)
