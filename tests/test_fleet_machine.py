"""Random turns, reports, moves, deaths and restarts: the fleet's tables balance, and its promises hold."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from continuum_lmcache.fleet.fleet import (
    COOLDOWN_S,
    GONE_S,
    IDLE_S,
    Fleet,
    KnownProgram,
    ReplicaId,
    ReplicaReport,
    Route,
    RouteReason,
)
from continuum_lmcache.types import ProgramId

MOST = 6
PROGRAMS = st.sampled_from([ProgramId(f"p{i}") for i in range(9)])
FIGURES = st.fixed_dictionaries(
    {"requests": st.sampled_from([0, 1, 5]), "wait_s": st.sampled_from([None, 0.0, 1.0, 60.0])}
)
RARELY = st.integers(0, 9).map(lambda n: n == 0)


@dataclass(frozen=True)
class Memory:
    """What a replica knows of a program, with times of the clock."""

    turns: int
    first_s: float
    began_s: float
    live: int

    def told(self, program: ProgramId, now_s: float) -> KnownProgram:
        age_s, idle_s = now_s - self.first_s, now_s - self.began_s
        return KnownProgram(program, self.turns, age_s, idle_s, self.live > 0)


class Machine(RuleBasedStateMachine):
    """A host whose replicas remember their programs, as ReplicaPrograms does, and report each change."""

    @initialize(count=st.integers(0, 3))
    def start(self, count: int) -> None:
        self.patch = pytest.MonkeyPatch()  # it forgets programs soon
        self.patch.setattr("continuum_lmcache.fleet.fleet.MOST_PROGRAMS", MOST)
        self.patch.setattr("continuum_lmcache.fleet.fleet.PROGRAMS_A_REPLICA", 2)
        self.now_s, self.numbers = 0.0, 0
        self.fleet = Fleet()
        self.memory: dict[ReplicaId, dict[ProgramId, Memory]] = {}
        self.moved_s: dict[ProgramId, float] = {}
        for _ in range(count):
            self.join()

    # replicas --------------------------------------------------------------

    @precondition(lambda self: len(self.memory) < 4)
    @rule()
    def join(self) -> None:
        self.numbers += 1
        replica = ReplicaId(f"replica-{self.numbers}")
        self.memory[replica] = {}
        self.fleet.on_report(self.now_s, ReplicaReport(replica))

    @precondition(lambda self: self.memory)
    @rule(data=st.data(), figures=FIGURES)
    def report(self, data: st.DataObject, figures: dict[str, float]) -> None:
        replica = data.draw(st.sampled_from(sorted(self.memory)))
        self.fleet.on_report(self.now_s, ReplicaReport(replica, **figures))  # type: ignore[arg-type]

    @precondition(lambda self: self.memory)
    @rule(data=st.data(), really=RARELY)
    def die(self, data: st.DataObject, really: bool) -> None:
        """Routers reach it no more, and nobody tells the fleet."""
        if really:
            del self.memory[data.draw(st.sampled_from(sorted(self.memory)))]

    @rule(really=RARELY)
    def restart(self, really: bool) -> None:
        """The fleet's process dies; the replicas report all that they know to the next one."""
        if not really:
            return
        before = {program: entry.home for program, entry in self.fleet.programs.items()}
        self.fleet = Fleet()
        for replica, known in self.memory.items():
            told = [memory.told(program, self.now_s) for program, memory in known.items()]
            self.fleet.on_report(self.now_s, ReplicaReport(replica), told)
        self.moved_s = {}
        if len(self.fleet.programs) < MOST:
            for program, home in before.items():
                knowing = [replica for replica, known in self.memory.items() if program in known]
                if knowing == [home] and self.now_s - self.memory[home][program].began_s < IDLE_S:
                    assert self.fleet.programs[program].home == home

    # turns -----------------------------------------------------------------

    @rule(program=PROGRAMS, ends=st.booleans())
    def arrive(self, program: ProgramId, ends: bool) -> None:
        entry = self.fleet.programs.get(program)
        home, in_flight = (entry.home, entry.is_live) if entry is not None else (None, False)
        if entry is None:
            self.moved_s.pop(program, None)  # the fleet has forgotten what it did with that name
        there = self.memory.keys() & self.fleet.replicas.keys()
        fresh = {name for name in there if self.fleet.replicas[name].is_fresh(self.now_s)}
        least = min((self.fleet.replicas[name].requests for name in fresh or there), default=None)
        before = {name: self.fleet.replicas[name] for name in there}
        requests = {name: state.requests for name, state in before.items()}
        route = self.fleet.on_arrival(self.now_s, program, self.fleet.replicas.keys() - self.memory.keys())
        if route is None:
            assert not there
            return
        assert route.replica in self.memory, "a replica that cannot be reached gets no turn"
        if home in there:
            assert route.replica == home or route.why is RouteReason.MOVED
        else:
            assert route.why is (RouteReason.FIRST if home is None else RouteReason.REHOMED)
        if route.why is not RouteReason.HOME:
            assert requests[route.replica] == least and (not fresh or route.replica in fresh)
        if route.why is RouteReason.MOVED:
            assert home in fresh and not in_flight
            assert before[home].report.wait_s and before[route.replica].report.wait_s is not None
            assert self.now_s - self.moved_s.get(program, -math.inf) >= COOLDOWN_S
            self.moved_s[program] = self.now_s
        self._says(program, route, live=1)
        if ends:
            self._says(program, route, live=-1)

    @precondition(lambda self: len(self.memory) > 1)
    @rule(program=PROGRAMS, seconds=st.sampled_from([0.1, 6.0, 31.0]))
    def a_program_comes_back_to_a_busy_home(self, program: ProgramId, seconds: float) -> None:
        self.now_s += seconds
        entry = self.fleet.programs.get(program)
        for replica in self.memory:
            busy = 60.0 if entry is not None and entry.home == replica else 0.0
            self.fleet.on_report(self.now_s, ReplicaReport(replica, int(busy), busy))
        self.arrive(program, ends=True)

    @precondition(lambda self: any(self.memory.values()))
    @rule(data=st.data(), is_last=RARELY)
    def end(self, data: st.DataObject, is_last: bool) -> None:
        replica = data.draw(st.sampled_from(sorted(name for name, known in self.memory.items() if known)))
        program = data.draw(st.sampled_from(sorted(self.memory[replica])))
        known = self.memory[replica][program]
        if known.live:
            self._says(program, Route(replica, RouteReason.HOME, known.turns), live=-1)
        elif is_last:
            del self.memory[replica][program]
            over = KnownProgram(program, is_over=True)
            self.fleet.on_report(self.now_s, ReplicaReport(replica), [over])
            assert program not in self.fleet.programs or self.fleet.programs[program].home != replica

    @rule(really=RARELY)
    def a_request_of_no_program(self, really: bool) -> None:
        gone = self.fleet.replicas.keys() - self.memory.keys()
        if really and (route := self.fleet.on_arrival(self.now_s, None, gone)) is not None:
            assert route.replica in self.memory

    @rule(seconds=st.sampled_from([0.01, 0.4, 2.0, 31.0, GONE_S + 1, IDLE_S]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def the_tables_balance(self) -> None:
        if hasattr(self, "fleet"):
            self.fleet.check()

    def teardown(self) -> None:
        if hasattr(self, "patch"):
            self.patch.undo()

    # -----------------------------------------------------------------------

    def _says(self, program: ProgramId, route: Route, live: int) -> None:
        """A turn began (1) or ended (-1) there, which the replica reports."""
        new = Memory(0, self.now_s - route.program_age_s, self.now_s, 0)
        known = self.memory[route.replica].get(program, new)
        turns = max(known.turns, route.program_turns) + (live < 0)
        began_s = self.now_s if live > 0 else known.began_s
        found = Memory(turns, known.first_s, began_s, known.live + live)
        self.memory[route.replica][program] = found
        state = self.fleet.replicas.get(route.replica)
        report = state.report if state is not None else ReplicaReport(route.replica)
        self.fleet.on_report(self.now_s, report, [found.told(program, self.now_s)])


TestFleetMachine = Machine.TestCase
TestFleetMachine.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
