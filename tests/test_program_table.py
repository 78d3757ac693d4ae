"""The tables of programs and pins, by example. tests/test_engine.py has the state machine."""

from __future__ import annotations

import pytest
from pin_tables import Tables

from continuum_lmcache.errors import InvariantError
from continuum_lmcache.types import FinishedTurn, PinEnd, ProgramId, Residency, Retention, TurnId

P = ProgramId("p")


def keep(ttl_s: float) -> Retention:
    return Retention(ttl_s, "test")


def turn(program: ProgramId, blocks: int = 3, number: int = 1) -> FinishedTurn:
    return FinishedTurn(program, number, ("pytest", "bash"), 100, blocks, Residency(0, 0, 0, 100))


def paused(
    tables: Tables, program: ProgramId, now_s: float, ttl_s: float, blocks: int = 3, shared_blocks: int = 0
) -> None:
    """One turn of the program, finished at now_s."""
    tables.arrived(now_s, TurnId(f"{program}{now_s}"), program)
    tables.release(program, PinEnd.REUSED)
    tables.finished(now_s, turn(program, blocks), keep(ttl_s), shared_blocks)


def test_a_return_says_which_tool_it_was_and_how_long() -> None:
    tables = Tables(10, 10)
    paused(tables, P, 5.0, ttl_s=2)
    assert tables.arrived(8.5, TurnId("t2"), P) == 3.5
    assert tables.programs.records[P].tool == ("pytest", "bash")
    tables.left(9.0, P)
    assert tables.arrived(9.5, TurnId("t3"), P) is None, "the gap ended once"


def test_a_turn_that_runs_already_prolongs_no_pin() -> None:
    tables = Tables(10, 10)
    tables.arrived(0.0, TurnId("stream"), P)
    tables.started(P)
    paused(tables, P, 1.0, ttl_s=2)
    assert tables.pins.next_deadline_s() == 3.0 and tables.pins.due(3.0) == [P]


def test_victims_are_the_latest_programs() -> None:
    tables = Tables(99, 99)
    for at_s, program in enumerate("abc"):
        paused(tables, ProgramId(program), float(at_s), ttl_s=9)
    assert [v.program for v in tables.pins.victims(ProgramId("b"))] == ["c", "a"]


def test_a_second_pin_for_one_program_is_a_bug_and_says_so() -> None:
    tables = Tables(10, 10)
    paused(tables, P, 0.0, ttl_s=2)
    tables.arrived(1.0, TurnId("t"), P)
    with pytest.raises(InvariantError, match="'p' already holds a pin of 3 blocks"):
        tables.finished(1.0, turn(P), keep(2))


def test_programs_beyond_the_limit_are_forgettable_longest_idle_first() -> None:
    tables = Tables(0, 0, max_programs=2)
    for at_s, program in enumerate("abcd"):
        paused(tables, ProgramId(program), float(at_s), ttl_s=0)
    assert [program.id for program in tables.idle(4.0, idle_s=1000)] == ["a", "b"]
    assert [program.id for program in tables.idle(1003.0, idle_s=1000)] == ["a", "b", "c", "d"]


def test_a_head_that_pins_share_counts_once_until_the_last_of_them_ends() -> None:
    tables = Tables(max_pinned_blocks=20, max_tenant_blocks=20)
    for at_s, program in enumerate("abcdef"):
        paused(tables, ProgramId(program), float(at_s), ttl_s=50.0, blocks=9, shared_blocks=7)
    assert tables.pins.pinned_blocks == 7 + 6 * 2 and len(tables.pins.pinned) == 6
    for left, program in reversed(list(enumerate("abcdef"))):
        tables.release(ProgramId(program), PinEnd.EXPIRED)
        tables.check()
        assert tables.pins.pinned_blocks == (7 + left * 2 if left else 0)
