"""The cost of our scheduler's step against stock's: its contenders and its figures."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from experiments.overhead import Spread, contenders, measured, more_ms, ratio, turn_costs_ms, verdict
from experiments.sweep.timed import StepCost, shared_clock
from experiments.sweep.timed_turn import TOOL, TimedTurns


def steps(*schedules_us: float) -> list[StepCost]:
    return [StepCost(us, 10.0, 0.0) for us in schedules_us]


def test_a_ratio_is_of_medians_of_one_repeat_and_its_range_over_the_repeats() -> None:
    calm = {"stock": steps(90, 90, 5000), "ours": steps(99, 99, 99)}
    slow = {"stock": steps(190, 190, 190), "ours": steps(190, 190, 9000)}
    jolt = {"stock": steps(90, 90, 90), "ours": steps(180, 180, 180)}
    found = ratio([calm, slow, jolt], "ours", "schedule_us")
    assert found == Spread(pytest.approx(1.1), pytest.approx(1.0), pytest.approx(2.0))
    assert ratio([calm], "ours", "whole_us").middle == pytest.approx(109 / 100)
    more = more_ms([calm, slow, jolt], "ours", "schedule_us")
    assert more == Spread(pytest.approx(0.009), pytest.approx(0.0), pytest.approx(0.09))


def test_each_figure_stands_beside_its_goal() -> None:
    assert verdict("a step", Spread(0.02, 0.01, 0.09), 0.02) == (
        "a step: 0.020 (0.010 to 0.090) ms more than stock's, goal 0.02: met"
    )
    assert verdict("a turn", Spread(0.38, 0.2, 0.5), 0.3).endswith("goal 0.3: MISSED")


def test_all_contenders_take_their_steps_in_one_process_pins_held() -> None:
    benches = contenders(running=3, waiting=4, pinned=2, rounds=30)
    repeats = list(measured(benches, rounds=5, repeats=2))
    assert [{name: len(costs) for name, costs in repeat.items()} for repeat in repeats] == [
        dict.fromkeys(benches, 5)
    ] * 2
    assert all(
        c.schedule_us > 0 < c.update_us and c.stats_us > 0 for r in repeats for cs in r.values() for c in cs
    )


def test_a_finished_turn_is_timed_with_its_tool_named_and_read_off_its_text() -> None:
    (costs_ms,) = turn_costs_ms(rounds=9, repeats=1)
    assert {"stock", "continuum, tool named", "continuum, tool read off the text"} < costs_ms.keys()
    assert all(cost_ms > 0 for cost_ms in costs_ms.values()), "which is dearer is the benchmark's to say"


@pytest.mark.parametrize(("named", "tool"), [(True, ("bash",)), (False, TOOL)])
def test_the_timed_turns_teach_the_tool_that_they_call(named: bool, tool: tuple[str, ...]) -> None:
    with shared_clock() as (clock, until):
        timed = TimedTurns("continuum", named, clock, until)
        for _ in range(4):
            timed.turn()
        gaps = timed.scheduler._lifecycle.advisor.gaps.exact(tool)
    assert gaps.samples_s == pytest.approx([0.5] * 3, rel=0.1)
