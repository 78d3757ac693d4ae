"""The gain of a switch: the same programs with it off and on."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from experiments.sweep.cases import Point
from experiments.switches import SWITCHES, chosen, line, pair


def test_each_switch_is_tried_alone_or_those_that_are_named_together() -> None:
    assert chosen(None) == [(name,) for name in SWITCHES]
    assert chosen(",".join(SWITCHES)) == [SWITCHES]
    with pytest.raises(typer.BadParameter, match="'evict_ended_program' is no switch"):
        chosen("admission,evict_ended_program")


def test_a_policy_of_ones_own_is_on_in_the_place_of_continuum(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "by_name.py").write_text("from experiments.policies import plas as own\n")
    monkeypatch.syspath_prepend(tmp_path)
    (names,) = chosen("by_name:own")
    mine, plas = (pair(Point(policy, 8, 0.1, 0), names, 3) for policy in ("continuum", "plas"))
    assert mine.on.mean_job_s == plas.off.mean_job_s != mine.off.mean_job_s


def test_both_runs_of_a_pair_are_of_one_seed_and_differ_in_the_switches_alone() -> None:
    point = Point("continuum", 8, 0.1, 0)
    same, joint = (pair(point, names, 3) for names in (["load_or_recompute"], ("priced_pins", "admission")))
    assert same.ratio == same.tail == 1.0, "without a tier nothing is loaded"
    assert joint.on == same.on, "everything but the switches stays"
    assert joint.off != joint.on
    pins = pair(point, ["pins"], 3)
    assert pins.on.pins["taken"] > 0 and not pins.off.pins.get("taken")
    assert line("joint", [joint]).startswith(f"| joint | {joint.ratio:.3f}")
