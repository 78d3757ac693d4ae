"""Random turns, reports, moves, deaths and restarts: the fleet's tables balance, and its promises hold."""

from __future__ import annotations

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from continuum_lmcache.fleet.fleet import (
    GONE_S,
    IDLE_S,
    Fleet,
    KnownProgram,
    ReplicaId,
    ReplicaReport,
    Route,
    RouteReason,
)
from continuum_lmcache.fleet.homes import hashed_replica
from continuum_lmcache.types import ProgramId

KEY = b"of this fleet"
COOLDOWN_S, MOST = 10.0, 6
PROGRAMS = st.sampled_from([ProgramId(f"p{i}") for i in range(9)])
FIGURES = st.fixed_dictionaries(
    {"requests": st.sampled_from([0, 1, 5]), "wait_s": st.sampled_from([0.0, 1.0, 60.0])}
)
RARELY = st.integers(0, 9).map(lambda n: n == 0)


def new_fleet() -> Fleet:
    fleet = Fleet(KEY, cooldown_s=COOLDOWN_S)
    fleet.most_programs = MOST
    return fleet


class Machine(RuleBasedStateMachine):
    """A host whose replicas remember their programs, as ReplicaPrograms does, and report each change."""

    @initialize(count=st.integers(0, 3))
    def start(self, count: int) -> None:
        self.now_s, self.numbers = 0.0, 0
        self.fleet = new_fleet()
        self.memory: dict[ReplicaId, dict[ProgramId, KnownProgram]] = {}
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
        self.fleet.on_report(self.now_s, ReplicaReport(replica, self.now_s))

    @precondition(lambda self: self.memory)
    @rule(data=st.data(), figures=FIGURES, age_s=st.sampled_from([0.0, 0.0, 4.0]))
    def report(self, data: st.DataObject, figures: dict[str, float], age_s: float) -> None:
        replica = data.draw(st.sampled_from(sorted(self.memory)))
        self.fleet.on_report(self.now_s, ReplicaReport(replica, self.now_s - age_s, **figures))  # type: ignore[arg-type]

    @precondition(lambda self: self.memory)
    @rule(data=st.data(), really=RARELY)
    def die(self, data: st.DataObject, really: bool) -> None:
        """Routers see it no more, and nobody tells the fleet."""
        if really:
            del self.memory[data.draw(st.sampled_from(sorted(self.memory)))]

    @rule(really=RARELY)
    def restart(self, really: bool) -> None:
        """The fleet's process dies; the replicas report all that they know to the next one."""
        if not really:
            return
        before = {program: entry.home for program, entry in self.fleet.programs.items()}
        self.fleet = new_fleet()
        for replica, known in self.memory.items():
            self.fleet.on_report(self.now_s, ReplicaReport(replica, self.now_s), known.values())
        self.moved_s = {}
        if len(self.fleet.programs) < MOST:
            for program, home in before.items():
                knowing = [replica for replica, known in self.memory.items() if program in known]
                assert knowing != [home] or self.fleet.programs[program].home == home

    # turns -----------------------------------------------------------------

    @rule(program=PROGRAMS, ends=st.booleans())
    def arrive(self, program: ProgramId, ends: bool) -> None:
        entry = self.fleet.programs.get(program)
        home, in_flight = (entry.home, entry.live) if entry is not None else (None, 0)
        if entry is None:
            self.moved_s.pop(program, None)  # the fleet has forgotten what it did with that name
        route = self.fleet.on_arrival(self.now_s, program, self.memory)
        if route is None:
            assert not self.memory.keys() & self.fleet.replicas.keys()
            return
        assert route.replica in self.memory, "a replica that no router sees gets no turn"
        if home in self.memory.keys() & self.fleet.replicas.keys():
            assert route.replica == home or route.why is RouteReason.MOVED
        elif home is not None:
            there = self.memory.keys() & self.fleet.replicas.keys()
            assert (route.why, route.replica) == (RouteReason.REHOMED, hashed_replica(program, there, KEY))
        elif route.why is RouteReason.FIRST:
            assert self.fleet.is_fresh(self.now_s, route.replica)
        if route.why is RouteReason.MOVED:
            assert home is not None and not in_flight
            assert self.fleet.is_fresh(self.now_s, home) and self.fleet.is_fresh(self.now_s, route.replica)
            assert self.now_s - self.moved_s.get(program, -math.inf) >= COOLDOWN_S
            self.moved_s[program] = self.now_s
        self._says(program, route, live=1)
        if ends:
            self._says(program, route, live=-1)

    @precondition(lambda self: len(self.memory) > 1)
    @rule(program=PROGRAMS, seconds=st.sampled_from([0.1, 6.0, 11.0]))
    def a_program_comes_back_to_a_busy_home(self, program: ProgramId, seconds: float) -> None:
        self.now_s += seconds
        entry = self.fleet.programs.get(program)
        for replica in self.memory:
            busy = 60.0 if entry is not None and entry.home == replica else 0.0
            self.fleet.on_report(self.now_s, ReplicaReport(replica, self.now_s, wait_s=busy))
        self.arrive(program, ends=True)

    @precondition(lambda self: any(self.memory.values()))
    @rule(data=st.data(), is_last=RARELY)
    def end(self, data: st.DataObject, is_last: bool) -> None:
        replica = data.draw(st.sampled_from(sorted(name for name, known in self.memory.items() if known)))
        program = data.draw(st.sampled_from(sorted(self.memory[replica])))
        known = self.memory[replica][program]
        if known.live:
            self._says(program, Route(replica, RouteReason.HOME, known.turns, known.age_s), live=-1)
        elif is_last:
            del self.memory[replica][program]
            over = KnownProgram(program, 0, 0, 0.0, is_over=True)
            self.fleet.on_report(self.now_s, ReplicaReport(replica, self.now_s), [over])
            assert program not in self.fleet.programs or self.fleet.programs[program].home != replica

    @rule(really=RARELY)
    def a_request_of_no_program(self, really: bool) -> None:
        if really and (route := self.fleet.on_arrival(self.now_s, None, self.memory)) is not None:
            assert route.replica in self.memory

    @rule(seconds=st.sampled_from([0.01, 0.4, 2.0, 11.0, GONE_S + 1, IDLE_S]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def the_tables_balance(self) -> None:
        if hasattr(self, "fleet"):
            self.fleet.check()

    # -----------------------------------------------------------------------

    def _says(self, program: ProgramId, route: Route, live: int) -> None:
        """A turn began (1) or ended (-1) there, which the replica reports."""
        known = self.memory[route.replica].get(program, KnownProgram(program, 0, 0, route.program_age_s))
        turns = max(known.turns, route.program_turns) + (live < 0)
        found = KnownProgram(program, turns, 100 * turns, known.age_s, known.live + live)
        self.memory[route.replica][program] = found
        figures = self.fleet.replicas[route.replica].report if route.replica in self.fleet.replicas else None
        wait_s = figures.wait_s if figures is not None else 0.0
        report = ReplicaReport(route.replica, self.now_s, wait_s=wait_s)
        self.fleet.on_report(self.now_s, report, [found])


TestFleetMachine = Machine.TestCase
TestFleetMachine.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
