"""The cost of our scheduler's step and turn against stock's: the contenders and the figures."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from experiments.overhead import TOOL, TURNS, TimedTurns, one_clock, turn_costs


def test_a_finished_turn_is_timed_with_its_tool_named_and_read_off_its_text() -> None:
    (costs,) = turn_costs(rounds=9, repeats=1)
    assert costs.keys() == TURNS.keys() and all(len(ms) == 9 and min(ms) > 0 for ms in costs.values())


@pytest.mark.parametrize(("named", "tool"), [(True, ("bash",)), (False, TOOL)])
def test_the_timed_turns_teach_the_tool_that_they_call(named: bool, tool: tuple[str, ...]) -> None:
    with one_clock() as (clock, until):
        timed = TimedTurns("continuum", named, clock, until)
        for _ in range(4):
            timed.turn()
        gaps = timed.scheduler._engine.learned.gaps.exact(tool)
    assert gaps.samples_s == pytest.approx([0.5] * 3, rel=0.1)
