"""The gain of a switch: the same programs with it off and on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import typer

from experiments.sweep.cases import Point
from experiments.switches import PINS, SWITCHES, chosen, jobs, line, pair


def test_each_switch_is_tried_alone_or_those_that_are_named_together() -> None:
    assert chosen(None) == [(name,) for name in SWITCHES]
    assert chosen(",".join(SWITCHES)) == [SWITCHES]
    with pytest.raises(typer.BadParameter, match="'evict_ended_program' is no switch"):
        chosen("admission,evict_ended_program")


def test_a_regime_is_named_by_a_part_and_a_disk_rate_goes_to_those_that_have_a_disk() -> None:
    found = {name: point.ssd_gbps for _, name, point in jobs([("admission",)], "fig8; SSD", 10, 0.2)}
    assert found == {"fig8, no offloading, 0.05": None, "fig14, + SSD 200 GB": 0.2}
    with pytest.raises(typer.BadParameter, match="no regime has 'fig99'"):
        list(jobs([("admission",)], "fig99", 10, None))


def test_both_runs_of_a_pair_are_of_one_seed_and_differ_in_the_switches_alone() -> None:
    point = Point("continuum", 30, 0.1, 0)
    same, admission = (pair(point, [name], 3) for name in ("load_or_recompute", "admission"))
    assert same.ratio == same.tail == 1.0, "without a tier nothing is loaded"
    assert admission.on == same.on, "everything but the switch stays"
    assert admission.ratio != 1.0
    joint = pair(point, ("admission", "priced_pins", "measured_chunk"), 3)
    assert joint.off not in (admission.off, joint.on), "the others are off too"
    pins = pair(replace(point, programs=8), [PINS], 3)
    assert pins.on.pins["taken"] > 0 and not pins.off.pins.get("taken")
    assert line("admission", [admission]).startswith(f"| admission | {admission.ratio:.3f}")
