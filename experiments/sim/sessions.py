"""The closed loops in the simulator: N live sessions for a time, or N workers for a batch of programs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm.v1.request import Request, RequestStatus

from experiments.sessions import SessionTurn, played
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
    ) -> None:
        super().__init__((), setup, clock, timetable, send)
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
        self.timetable.at(self.clock.now_s, partial(self._submit, live))

    def _submit(self, live: LiveProgram) -> None:
        if self.are_gone:
            return
        name, session = live.program.program_id, self.session_of[live.program.program_id]
        of_turns, asked = len(live.program.turns), live.spec.output_tokens
        turn = SessionTurn(session, name, live.turn + 1, of_turns, asked, self.clock.now_s)
        self.live[live.request_id] = turn
        self.played.append(turn)
        super()._submit(live)


class ClosedLoop(Simulation):
    """One engine with sessions that never end by themselves, or with the workers of a batch."""

    agents: SessionAgents

    def run_until(self, end_s: float) -> None:
        """Run to that moment, or until the sessions have no more programs. Then the clients leave."""
        self.advance_while(lambda: self.clock.now_s < end_s and not self.agents.done)
        self.agents.leave()
        scheduler = self.engines[0].scheduler
        scheduler.finish_requests(list(scheduler.requests), RequestStatus.FINISHED_ABORTED)
        self.advance_while(lambda: bool(scheduler.requests))  # loads that are under way
        self.drain()


@dataclass(frozen=True, slots=True)
class Played:
    """What a closed loop gave."""

    turns: Sequence[SessionTurn]
    result: Result  # its jobs: the programs that ended
    end_s: float  # of the run


def play(pool: Sequence[Program], setup: Setup, sessions: int, seed: int, end_s: float) -> Played:
    """`sessions` live sessions until `end_s`. Raises TraceError and InvariantError, as simulate() does."""
    return _run(pool, setup, sessions, partial(played, pool, seed=seed), end_s)


def play_batch(programs: Sequence[Program], setup: Setup, workers: int) -> Played:
    """All programs, each whole and once; a worker that is free takes the next one."""
    left = deque(programs)

    def taken(_worker: int) -> Iterator[tuple[Program, int]]:
        while left:
            yield left.popleft(), 0

    return _run(programs, setup, workers, taken, float("inf"))


def _run(
    pool: Sequence[Program],
    setup: Setup,
    sessions: int,
    programs_of: Callable[[int], Iterator[tuple[Program, int]]],
    end_s: float,
) -> Played:
    with schedulers(setup, pool) as (made, clock):
        agents = partial(SessionAgents, sessions=sessions, programs_of=programs_of)
        loop = ClosedLoop(agents, setup, made, clock)
        loop.run_until(end_s)
        turns = loop.agents.played
        return Played(turns, loop.result(), min(end_s, max(t.last_s or 0.0 for t in turns)))
