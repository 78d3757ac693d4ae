"""The books: examples that read as rules, and a machine that tries to unbalance them."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from continuum_lmcache.errors import InvariantError
from continuum_lmcache.programs.table import ProgramReturn, ProgramTable
from continuum_lmcache.types import FinishedTurn, Pin, PinEnd, ProgramId, Residency, Retention, TurnId

P, Q = ProgramId("p"), ProgramId("q")


def keep(ttl_s: float) -> Retention:
    return Retention(ttl_s, "test", "test")


def turn(program: ProgramId, blocks: int = 3, number: int = 1) -> FinishedTurn:
    return FinishedTurn(program, number, ("pytest", "bash"), 100, blocks, Residency(0, 0, 0, 100))


def paused(ledger: ProgramTable, program: ProgramId, now_s: float, ttl_s: float, blocks: int = 3) -> None:
    """One turn of the program, finished at now_s."""
    ledger.arrived(now_s, TurnId(f"{program}{now_s}"), program)
    ledger.release(program, PinEnd.REUSED)
    ledger.finished(now_s, TurnId(f"{program}{now_s}"), turn(program, blocks), keep(ttl_s))


def test_a_return_says_which_tool_it_was_and_how_long() -> None:
    ledger = ProgramTable(10, 10)
    paused(ledger, P, 5.0, ttl_s=2)
    assert ledger.arrived(8.5, TurnId("t2"), P) == ProgramReturn(("pytest", "bash"), 3.5)
    assert ledger.arrived(9.0, TurnId("t3"), P) is None, "a second request in the same pause is no return"


def test_a_pin_is_due_at_its_deadline_and_not_before() -> None:
    ledger = ProgramTable(10, 10)
    paused(ledger, P, 0.0, ttl_s=2)
    assert ledger.due(1.999) == [] and ledger.next_deadline_s() == 2.0
    assert ledger.due(2.0) == [P]


def test_a_pin_is_not_due_while_the_next_turn_is_here_and_is_once_that_leaves() -> None:
    ledger = ProgramTable(10, 10)
    paused(ledger, P, 0.0, ttl_s=2)
    ledger.arrived(1.0, TurnId("next"), P)
    assert ledger.due(99.0) == [] and ledger.next_deadline_s() == 300.0
    ledger.left(100.0, TurnId("next"), P)
    assert ledger.due(100.0) == [P]


def test_a_pin_outlives_the_longest_ttl_for_nobody() -> None:
    ledger = ProgramTable(10, 10, max_ttl_s=50.0)
    paused(ledger, P, 10.0, ttl_s=2)
    ledger.arrived(11.0, TurnId("waits"), P)
    assert ledger.due(59.9) == [] and ledger.next_deadline_s() == 60.0
    assert ledger.due(60.0) == [P]


def test_a_turn_that_runs_already_prolongs_no_pin() -> None:
    ledger = ProgramTable(10, 10)
    ledger.arrived(0.0, TurnId("stream"), P)
    ledger.started(TurnId("stream"), P)
    paused(ledger, P, 1.0, ttl_s=2)
    assert ledger.next_deadline_s() == 3.0 and ledger.due(3.0) == [P]


def test_the_budget_refuses_and_counts() -> None:
    ledger = ProgramTable(5, 5)
    paused(ledger, P, 0.0, ttl_s=2)
    paused(ledger, Q, 1.0, ttl_s=2)
    assert list(ledger.pinned) == [P] and ledger.refused == {"budget": 1}


def test_victims_are_the_latest_programs() -> None:
    ledger = ProgramTable(99, 99)
    for at_s, program in enumerate("abc"):
        paused(ledger, ProgramId(program), float(at_s), ttl_s=9)
    assert [v.program for v in ledger.victims(ProgramId("b"))] == ["c", "a"]


def test_a_second_pin_for_one_program_is_a_bug_and_says_so() -> None:
    ledger = ProgramTable(10, 10)
    paused(ledger, P, 0.0, ttl_s=2)
    ledger.arrived(1.0, TurnId("t"), P)
    with pytest.raises(InvariantError, match="'p' already holds a pin of 3 blocks"):
        ledger.finished(1.0, TurnId("t"), turn(P), keep(2))


def test_programs_beyond_the_limit_are_forgettable_longest_idle_first() -> None:
    ledger = ProgramTable(0, 0, max_programs=2)
    for at_s, program in enumerate("abcd"):
        paused(ledger, ProgramId(program), float(at_s), ttl_s=0)
    assert ledger.forgettable(4.0, idle_s=1000) == ["a", "b"]
    assert ledger.forgettable(1003.0, idle_s=1000) == ["a", "b", "c", "d"]


class Books(RuleBasedStateMachine):
    """Programs come, pin, return, leave and are forgotten in any order; the books always balance."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = ProgramTable(max_pinned_blocks=20, max_tenant_blocks=12, max_programs=4, max_ttl_s=20.0)
        self.now_s = 0.0
        self.count = 0
        self.live: dict[TurnId, ProgramId] = {}

    @rule(seconds=st.floats(0, 20))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(program=st.sampled_from("abcdef"))
    def a_turn_arrives(self, program: str) -> None:
        self.count += 1
        turn_id = TurnId(str(self.count))
        self.ledger.arrived(
            self.now_s, turn_id, ProgramId(program), tenant="even" if program in "ace" else "odd"
        )
        self.live[turn_id] = ProgramId(program)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), ttl_s=st.sampled_from([0.0, 0.5, 3.0, 50.0]), blocks=st.integers(0, 9))
    def a_turn_pauses(self, data: st.DataObject, ttl_s: float, blocks: int) -> None:
        turn_id = data.draw(st.sampled_from(sorted(self.live)))
        program = self.live.pop(turn_id)
        self.ledger.release(program, PinEnd.SUPERSEDED)
        self.ledger.finished(self.now_s, turn_id, turn(program, blocks), keep(ttl_s))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def a_turn_starts(self, data: st.DataObject) -> None:
        turn_id = data.draw(st.sampled_from(sorted(self.live)))
        self.ledger.started(turn_id, self.live[turn_id])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def a_turn_leaves(self, data: st.DataObject) -> None:
        turn_id = data.draw(st.sampled_from(sorted(self.live)))
        self.ledger.left(self.now_s, turn_id, self.live.pop(turn_id))

    @rule(program=st.sampled_from("abcdef"))
    def a_program_ends(self, program: str) -> None:
        self.ledger.release(ProgramId(program), PinEnd.ENDED)
        ended = self.ledger.ended(ProgramId(program))
        assert ended is None or program not in self.live.values()

    @rule()
    def pins_expire(self) -> None:
        for program in self.ledger.due(self.now_s):
            assert self.ledger.release(program, PinEnd.EXPIRED) is not None
        assert all(self.ends_s(p) > self.now_s for p in self.ledger.pinned.values()), "a due pin was missed"

    def ends_s(self, pin: Pin) -> float:
        """When a pin ends, unless somebody comes or goes."""
        last_s = pin.taken_s + 20.0
        return last_s if self.ledger.programs[pin.program].waiting else min(pin.deadline_s, last_s)

    @rule()
    def idle_ones_are_forgotten(self) -> None:
        for program in self.ledger.forgettable(self.now_s, idle_s=30):
            assert self.ledger.ended(program) is not None

    @invariant()
    def the_books_balance(self) -> None:
        self.ledger.check()
        assert {t for p in self.ledger.programs.values() for t in p.live} == set(self.live)
        deadlines = [self.ends_s(pin) for pin in self.ledger.pinned.values()]
        assert self.ledger.next_deadline_s() == min(deadlines, default=None)


Books.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestBooks = Books.TestCase
