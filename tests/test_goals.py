"""The table of goals: its cases and its verdicts. Nothing is simulated here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.sweep.cases import Point, SweepError
from experiments.sweep.goals import OURS, Goal, goals, line, verdict
from experiments.sweep.grids import Size
from experiments.sweep.rows import Rows

GOAL = Goal("a regime", Point(OURS, 1, 1.0, 0), (Point("fcfs", 1, 1.0, 0),), least=1.05, aim=1.10)


def test_some_goals_are_chosen_by_parts_of_their_names() -> None:
    some = [goal.regime for goal in goals(Size.FULL, "fig9, DRAM; SSD")]
    assert some == ["fig9, DRAM 100 GB, 0.05", "fig9, DRAM 100 GB, 0.1", "fig14, + SSD 200 GB"]
    with pytest.raises(SweepError, match="no goal has 'h4' in its name; at this size there are: fig9"):
        goals(Size.FULL, "h4")


def test_everybody_in_a_goal_runs_the_same_programs() -> None:
    for goal in goals(Size.FULL):
        for point in goal.points:
            same = {"contender": point.contender, "dram_gb": point.dram_gb, "ssd_gb": point.ssd_gb}
            assert replace(goal.ours, **same, max_ttl_s=point.max_ttl_s) == point, goal.regime


def test_a_verdict_asks_the_mean_or_the_worst_seed_and_then_the_tail() -> None:
    assert verdict(GOAL, [1.0, 1.2], [1.0]) == "aim"
    assert verdict(GOAL, [1.0, 1.12], [1.0]) == "least"
    assert verdict(GOAL, [1.0, 1.0], [1.0]) == "MISSED"
    assert verdict(GOAL, [1.2], [1.0, 1.2]) == "aim, TAIL"
    assert verdict(replace(GOAL, worst_seed=True), [1.0, 1.2], [1.0]) == "MISSED"


def test_a_line_takes_the_best_rival_of_each_seed(tmp_path) -> None:
    rows, rivals = Rows(tmp_path / "rows.csv"), (Point("fcfs", 1, 1.0, 0), Point("plas", 1, 1.0, 0))
    goal = replace(GOAL, rivals=rivals)
    means_s = {OURS: (10.0, 10.0), "fcfs": (12.0, 30.0), "plas": (20.0, 11.0), "program-fcfs": (15.0, 9.0)}
    for seed in (3, 4):
        for point in goal.at(seed).points:
            mean_s = means_s[point.contender][seed - 3]
            tails = {"job_p99_s": 2 * mean_s, "ttft_p99_s": mean_s, "ttft_max_s": 3 * mean_s}
            rows.add(point, {"job_mean_s": mean_s, **tails})
    said = line(rows, goal, [3, 4])
    assert said[3:6] == ["1.200 1.100", "1.150 +- 0.050", "aim"]
    assert said[7] == "10.0, 30.0 (12.0, 36.0)"
