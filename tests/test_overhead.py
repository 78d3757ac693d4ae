"""The cost of our scheduler's step and turn against stock's: the contenders and the figures."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from experiments.overhead import (
    STEPS,
    TOOL,
    TURNS,
    Spread,
    TimedTurns,
    more_ms,
    one_clock,
    step_costs,
    turn_costs,
    verdict,
)


def test_a_difference_is_of_medians_of_one_repeat_and_its_range_over_the_repeats() -> None:
    calm = {"stock": [90, 90, 5000], "ours": [99, 99, 99]}
    slow = {"stock": [190, 190, 190], "ours": [190, 190, 9000]}
    jolt = {"stock": [90, 90, 90], "ours": [180, 180, 180]}
    assert more_ms([calm, slow, jolt], "ours") == Spread(9, 0, 90)


def test_each_figure_stands_beside_its_goal() -> None:
    assert verdict("a step", Spread(0.02, 0.01, 0.09), 0.02) == (
        "a step: 0.020 (0.010 to 0.090) ms more than stock's, goal 0.02: met"
    )
    assert verdict("a turn", Spread(0.38, 0.2, 0.5), 0.3).endswith("goal 0.3: MISSED")


def test_all_contenders_take_their_steps_in_one_process_beside_turns_that_wait() -> None:
    repeats = step_costs(running=3, waiting=4, rounds=5, repeats=2)
    assert [{name: len(costs) for name, costs in repeat.items()} for repeat in repeats] == [
        dict.fromkeys(STEPS, 5)
    ] * 2
    assert all(cost_ms > 0 for repeat in repeats for costs in repeat.values() for cost_ms in costs)


def test_a_finished_turn_is_timed_with_its_tool_named_and_read_off_its_text() -> None:
    (costs,) = turn_costs(rounds=9, repeats=1)
    assert costs.keys() == TURNS.keys() and all(len(ms) == 9 and min(ms) > 0 for ms in costs.values())


@pytest.mark.parametrize(("named", "tool"), [(True, ("bash",)), (False, TOOL)])
def test_the_timed_turns_teach_the_tool_that_they_call(named: bool, tool: tuple[str, ...]) -> None:
    with one_clock() as (clock, until):
        timed = TimedTurns("continuum", named, clock, until)
        for _ in range(4):
            timed.turn()
        gaps = timed.scheduler._engine.advisor.gaps.exact(tool)
    assert gaps.samples_s == pytest.approx([0.5] * 3, rel=0.1)
