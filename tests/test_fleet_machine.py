"""The fleet's tables balance after any events of replicas, clients and the fleet's process, in any order."""

from __future__ import annotations

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from continuum_lmcache.fleet.fleet import Fleet, FleetConfig, Held, KnownProgram, Refused, Route, RouteReason
from continuum_lmcache.fleet.report import ReplicaId, ReplicaReport
from continuum_lmcache.types import ProgramId, TurnId

KEY = b"of this fleet"
CONFIG = FleetConfig(
    cooldown_s=5.0, cost_factor=1.0, margin_s=0.1, max_line=3, max_wait_s=20.0, max_programs=4
)
GPU_TOKENS = 4000
PROGRAMS = st.sampled_from([None, *(ProgramId(name) for name in "abcdefgh")])
TOKENS = st.integers(1, 3000)
RARELY = st.integers(0, 3).map(lambda n: n == 3)
FIGURES = st.fixed_dictionaries(
    {
        "requests": st.integers(0, 4),
        "headroom_tokens": st.none() | st.floats(-1000, GPU_TOKENS),
        "pending_programs": st.sampled_from([0, 0, 0, 1]),
        "oldest_returning_wait_s": st.sampled_from([0.0, 1.0, 20.0]),
        "returning_first": st.booleans(),
    }
)


class Machine(RuleBasedStateMachine):
    """One fleet, and the knowledge of its replicas and clients."""

    @initialize(mover=st.sampled_from(["cost", "never"]), count=st.integers(0, 3))
    def start(self, mover: str, count: int) -> None:
        self.now_s = 100.0
        self.config = FleetConfig(**{**_fields(CONFIG), "mover": mover})
        self.fleet = Fleet(self.config, KEY)
        self.reports: dict[ReplicaId, ReplicaReport] = {}
        self.memory: dict[ReplicaId, dict[ProgramId, KnownProgram]] = {}  # of each replica that is there
        self.sent: dict[TurnId, tuple[ProgramId | None, ReplicaId, int]] = {}
        self.held: dict[TurnId, tuple[ProgramId, int]] = {}
        self.moved_s: dict[ProgramId, float] = {}
        self.numbers = self.most_here = 0
        for _ in range(count):
            self.join({})

    # replicas --------------------------------------------------------------

    @precondition(lambda self: len(self.reports) < 4)
    @rule(figures=FIGURES)
    def join(self, figures: dict[str, object]) -> None:
        replica = ReplicaId(f"replica-{self._number()}")
        self.memory[replica] = {}
        self.reports[replica] = self._report(replica, figures)
        self.fleet.on_replica_join(self.now_s, self.reports[replica])

    @precondition(lambda self: self.reports)
    @rule(data=st.data(), figures=FIGURES, age_s=st.sampled_from([0.0, 0.0, 3.0]))
    def report(self, data: st.DataObject, figures: dict[str, object], age_s: float) -> None:
        replica = data.draw(st.sampled_from(sorted(self.reports)))
        found = self._report(replica, figures, age_s)
        self.fleet.on_report(self.now_s, found)
        if found.at_s >= self.reports[replica].at_s:
            self.reports[replica] = found

    @rule(figures=FIGURES)
    def a_stranger_reports(self, figures: dict[str, object]) -> None:
        self.fleet.on_report(self.now_s, self._report(ReplicaId("gone"), figures))

    @precondition(lambda self: self.reports)
    @rule(data=st.data(), really=RARELY)
    def leave(self, data: st.DataObject, really: bool) -> None:
        if not really:
            return
        replica = data.draw(st.sampled_from(sorted(self.reports)))
        del self.reports[replica], self.memory[replica]
        self.fleet.on_replica_drain(replica)

    @precondition(lambda self: self.reports)
    @rule(data=st.data(), really=RARELY)
    def die(self, data: st.DataObject, really: bool) -> None:
        if not really:
            return
        replica = data.draw(st.sampled_from(sorted(self.reports)))
        del self.reports[replica], self.memory[replica]
        self.sent = {turn: one for turn, one in self.sent.items() if one[1] != replica}
        self.fleet.on_replica_death(self.now_s, replica)
        assert all(entry.home != replica for entry in self.fleet.programs.values())

    @rule(really=RARELY, data=st.data())
    def restart(self, really: bool, data: st.DataObject) -> None:
        """The fleet's process dies and queries the replicas, of which one may answer later; clients in the
        line retry."""
        if not really:
            return
        late = data.draw(st.sampled_from([None, *sorted(self.reports)]))
        for turn in [turn for turn, (_, replica, _) in self.sent.items() if replica == late]:
            self._replica_hears("paused", turn, *self.sent.pop(turn))
        before = {p: self.fleet.home(p) for known in self.memory.values() for p in known}
        self.fleet = Fleet(self.config, KEY)
        for replica, report in self.reports.items():
            self.fleet.on_replica_join(self.now_s, report)
            if replica != late:
                self.fleet.restore(self.now_s, replica, self.memory[replica].values())
        self.moved_s = {p: at_s for p, at_s in self.moved_s.items() if p in self.fleet.programs}
        lost = self.sent.keys() - self.fleet.turns.keys()
        for turn in lost:  # of no program, on a replica that drains, or of a program that two remember
            program, replica, _ = self.sent.pop(turn)
            remember = [known for known in self.memory.values() if program in known]
            assert program is None or replica not in self.reports or len(remember) > 1
        for program, home in before.items():
            places = [replica for replica, known in self.memory.items() if program in known]
            if (
                home is not None
                and len(places) == 1
                and late not in places
                and len(self.fleet.programs) < CONFIG.max_programs
            ):
                assert self.fleet.home(program) == home
        held, self.held = self.held, {}
        for turn, (program, tokens) in held.items():
            answer = self.fleet.on_arrival(self.now_s, turn, program, tokens)
            self._take_started(turn)
            self._answered(turn, program, tokens, answer)
        if late is not None and self.memory[late]:
            self.arrive(data.draw(st.sampled_from(sorted(self.memory[late]))), 3000, 0)

    @precondition(lambda self: self.reports)
    @rule(data=st.data())
    def a_table_comes_late(self, data: st.DataObject) -> None:
        """As after a restart, to which a replica answers when turns have arrived already."""
        replica = data.draw(st.sampled_from(sorted(self.reports)))
        self.fleet.restore(self.now_s, replica, self.memory[replica].values())
        for turn in [turn for turn in self.held if turn in self.fleet.turns]:
            program, tokens = self.held[turn]
            assert self.fleet.home(program) == replica
            self._answered(turn, program, tokens, self.fleet.turns[turn].route)

    # turns -----------------------------------------------------------------

    @rule(program=PROGRAMS, tokens=TOKENS, said=st.sampled_from([0, 0, 0, 7]))
    def arrive(self, program: ProgramId | None, tokens: int, said: int) -> None:
        turn = TurnId(f"turn-{self._number()}")
        home = self.fleet.home(program) if program is not None else None
        new = program is not None and program not in self.fleet.programs
        if new and program is not None:  # of that name: the fleet has forgotten the other
            self.moved_s.pop(program, None)
        was_full = self.fleet.placement.new_programs >= CONFIG.max_line
        live = program is not None and any(p == program for p, *_ in self.sent.values())
        answer = self.fleet.on_arrival(self.now_s, turn, program, tokens, said, said * 10.0)
        if isinstance(answer, Refused):
            assert (new and was_full and not said) or (program is None and not self.reports)
            assert 1.0 <= answer.retry_after_s <= CONFIG.max_wait_s
        if home is not None:
            assert isinstance(answer, Route), "a program with a home never waits"
            assert answer.replica == home or answer.why is RouteReason.MOVED
        if isinstance(answer, Route) and answer.why is RouteReason.MOVED:
            assert program is not None and answer.moved_from == home and not live
            self._may_move(program, answer)
        self._take_started(turn)
        self._answered(turn, program, tokens, answer)

    @rule(names=st.lists(PROGRAMS, min_size=1, max_size=5), tokens=st.integers(1, 300))
    def whole_turns(self, names: list[ProgramId | None], tokens: int) -> None:
        for program in names:
            self.arrive(program, tokens, 0)
            turn = TurnId(f"turn-{self.numbers}")
            if turn in self.sent:
                self._goes_on("paused", turn)

    @precondition(lambda self: len(self.reports) > 1)
    @rule(data=st.data(), tokens=st.integers(1, 300), seconds=st.sampled_from([0.0, 1.0, 6.0]))
    def a_program_comes_back_to_a_busy_home(self, data: st.DataObject, tokens: int, seconds: float) -> None:
        homes = {p: r for r, known in self.memory.items() for p in known if self.fleet.home(p) == r}
        if not homes:
            return
        program = data.draw(st.sampled_from(sorted(homes)))
        self.now_s += seconds
        for replica in self.reports:
            busy = {"requests": 3, "oldest_returning_wait_s": 30.0, "headroom_tokens": -1.0}
            idle = {"headroom_tokens": float(GPU_TOKENS)}
            figures = busy if replica == homes[program] else idle
            self.reports[replica] = self._report(replica, figures)
            self.fleet.on_report(self.now_s, self.reports[replica])
        self.arrive(program, tokens, 0)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        turn = data.draw(st.sampled_from(sorted(self.held)))
        program, tokens = self.held[turn]
        answer = self.fleet.on_arrival(self.now_s, turn, program, tokens)
        assert not isinstance(answer, Refused)
        self._take_started(turn)
        self._answered(turn, program, tokens, answer)

    @rule()
    def admit(self) -> None:
        for route in self.fleet.admit(self.now_s):
            program, tokens = self.held.pop(route.turn)
            self._answered(route.turn, program, tokens, route)

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), how=st.sampled_from(["first_token", "paused", "paused", "ended", "lost"]))
    def goes_on(self, data: st.DataObject, how: str) -> None:
        turn = data.draw(st.sampled_from(sorted(self.sent)))
        self._goes_on(how, turn)

    def _goes_on(self, how: str, turn: TurnId) -> None:
        if how == "first_token":
            self.fleet.on_first_token(turn)
            return
        program, replica, tokens = self.sent.pop(turn)
        if how == "paused":
            self.fleet.on_pause(self.now_s, turn, tokens + 10)
        elif how == "ended":
            self.fleet.on_last_turn_end(self.now_s, turn)
        else:
            self.fleet.on_abort(self.now_s, turn)
        self._replica_hears(how, turn, program, replica, tokens)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def client_leaves_the_line(self, data: st.DataObject) -> None:
        turn = data.draw(st.sampled_from(sorted(self.held)))
        del self.held[turn]
        self.fleet.on_abort(self.now_s, turn)

    @rule(how=st.sampled_from(["paused", "ended", "lost", "first_token"]))
    def news_of_an_unknown_turn(self, how: str) -> None:
        turn = TurnId("never seen")
        {
            "paused": lambda: self.fleet.on_pause(self.now_s, turn, 5),
            "ended": lambda: self.fleet.on_last_turn_end(self.now_s, turn),
            "lost": lambda: self.fleet.on_abort(self.now_s, turn),
            "first_token": lambda: self.fleet.on_first_token(turn),
        }[how]()

    @rule(seconds=st.sampled_from([0.01, 0.4, 2.0, 10.0, 40.0, 4000.0]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds

    # invariants ------------------------------------------------------------

    @invariant()
    def the_books_balance(self) -> None:
        if not hasattr(self, "fleet"):
            return
        self.fleet.check()
        assert set(self.fleet.waiting) == set(self.held)
        assert set(self.fleet.turns) == set(self.sent)
        assert len(self.fleet.programs) <= max(CONFIG.max_programs, self.most_here)

    def teardown(self) -> None:
        """No turn waits for ever: with a replica that reports, the line empties."""
        if not hasattr(self, "fleet"):
            return
        if not self.reports:
            self.join({"headroom_tokens": -1.0, "requests": 3})
        for _ in range(len(self.held)):
            self.now_s += CONFIG.max_wait_s + 1
            for replica in self.reports:
                self.reports[replica] = self._report(replica, {"headroom_tokens": -1.0, "requests": 3})
                self.fleet.on_report(self.now_s, self.reports[replica])
            self.admit()  # the first in line has been so from now on, or goes
            self.now_s += CONFIG.max_wait_s + 1
            for replica in self.reports:
                self.reports[replica] = self._report(replica, {"headroom_tokens": -1.0, "requests": 3})
                self.fleet.on_report(self.now_s, self.reports[replica])
            self.admit()
            self.the_books_balance()
        assert not self.held

    # -----------------------------------------------------------------------

    def _number(self) -> int:
        self.numbers += 1
        return self.numbers

    def _report(self, replica: ReplicaId, figures: dict[str, object], age_s: float = 0.0) -> ReplicaReport:
        return ReplicaReport(replica, self.now_s - age_s, GPU_TOKENS, **figures)  # type: ignore[arg-type]

    def _age_s(self, replica: ReplicaId) -> float:
        return self.now_s - self.reports[replica].at_s

    def _may_move(self, program: ProgramId, route: Route) -> None:
        assert route.moved_from is not None
        assert max(self._age_s(route.moved_from), self._age_s(route.replica)) <= CONFIG.move_age_s
        assert self.now_s - self.moved_s.get(program, -math.inf) >= CONFIG.cooldown_s
        self.moved_s[program] = self.now_s

    def _answered(
        self, turn: TurnId, program: ProgramId | None, tokens: int, answer: Route | Held | Refused
    ) -> None:
        assert answer.turn == turn
        if isinstance(answer, Held):
            assert program is not None
            self.held[turn] = (program, tokens)
        elif isinstance(answer, Route):
            self.held.pop(turn, None)
            assert answer.replica in self.reports
            if answer.why in (RouteReason.FIRST, RouteReason.LET_IN, RouteReason.REHOMED):
                assert self._age_s(answer.replica) <= CONFIG.first_turn_age_s
            self.sent[turn] = (program, answer.replica, tokens)
            if program is not None:
                for known in self.memory.values():
                    if answer.why is RouteReason.MOVED:
                        known.pop(program, None)
                old = self.memory[answer.replica].get(
                    program, KnownProgram(program, answer.program_turns, 0, 0.0)
                )
                self.memory[answer.replica][program] = KnownProgram(
                    program, old.turns, old.context_tokens, answer.program_age_s, (*old.live, turn)
                )
        here = {p for p, *_ in self.sent.values()} | {p for p, _ in self.held.values()}
        self.most_here = max(self.most_here, len(here))

    def _take_started(self, turn: TurnId) -> None:
        """The program's other turns in the line have started with it."""
        for other, (program, tokens) in list(self.held.items()):
            if other != turn and (live := self.fleet.turns.get(other)) is not None:
                self._answered(other, program, tokens, live.route)

    def _replica_hears(
        self, how: str, turn: TurnId, program: ProgramId | None, replica: ReplicaId, tokens: int
    ) -> None:
        known = self.memory.get(replica, {}).get(program) if program is not None else None
        if known is None or program is None:
            return
        live = tuple(t for t in known.live if t != turn)
        turns = known.turns + (how != "lost")
        if (how == "ended" or not turns) and not live:
            del self.memory[replica][program]
        else:
            context = tokens + 10 if how == "paused" else known.context_tokens
            self.memory[replica][program] = KnownProgram(program, turns, context, known.age_s, live)


def _fields(config: FleetConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in FleetConfig.__slots__}


TestFleetMachine = Machine.TestCase
TestFleetMachine.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
