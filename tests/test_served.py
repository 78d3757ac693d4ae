"""How many live programs an engine serves in time: the signal to scale, from events of programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from admission_rig import AdmissionRig

from continuum_lmcache.admission.controller import KVCapacity
from continuum_lmcache.admission.served import P90_WAITS, Pace, served_in_time
from continuum_lmcache.config import ContinuumConfig
from continuum_lmcache.policy.interface import Room
from continuum_lmcache.serve.scaling import FULL, IN_TIME, LIVE, replicas
from continuum_lmcache.types import Place, ProgramId
from continuum_lmcache.vllm_plugin.hooks.prometheus import METRICS
from experiments.fleet.rising import Autoscaler, Scaled, arriving, in_words, p90_s, ramp_s, rows_of, run
from experiments.fleet.routers import Ours
from experiments.fleet.table import MACHINE
from experiments.table1 import Lognormal, Shape, draw

ROOM = Room(ContinuumConfig(), 1000.0, 0, 0.0, 0.0, 0, False, 0.0, Place(True, "", 0.0))
PACE = Pace(forecast_tokens=100.0, away=4, yielded=0, turn_s=0.0)


def test_without_a_tier_contexts_in_tool_calls_take_room_and_with_one_they_take_none_on_the_gpu() -> None:
    assert served_in_time(ROOM, PACE, 30.0) == 10
    assert served_in_time(ROOM._replace(tier_tokens=1200), PACE, 30.0) == 12, "the tier is full"
    assert served_in_time(ROOM._replace(tier_tokens=4000), PACE, 30.0) == 14
    assert served_in_time(ROOM, PACE._replace(away=0, yielded=4), 30.0) == 14, (
        "they have given their places up"
    )


def test_a_head_that_all_share_counts_once() -> None:
    assert served_in_time(ROOM._replace(head_tokens=100), PACE, 30.0) == 9
    assert served_in_time(ROOM._replace(head_tokens=2000), PACE, 30.0) == 1, "one is always served"


def test_programs_that_share_all_of_their_contexts_are_served_too() -> None:
    """A load test's one prompt, which is a head of whole blocks, with answers that are never sent back."""
    rig = AdmissionRig(KVCapacity(1000), 180.0)
    rig.on_arrival(0.0, ProgramId("a"), 0)  # of its own
    rig.admission.admit(0.0, idle=True)
    assert rig.programs.started_tokens == 0.0 and rig.admission.programs_in_time is not None


def test_by_littles_law_more_may_wait_the_more_turns_end_and_the_later_first_tokens_may_come() -> None:
    pace = PACE._replace(turn_s=2.0)
    assert served_in_time(ROOM, pace, 30.0) == 10 + 30 / P90_WAITS / 2
    assert served_in_time(ROOM, pace, 0.0) == 10


def test_live_programs_have_a_turn_here_or_are_expected_back_and_a_request_without_a_name_is_none() -> None:
    rig = AdmissionRig(KVCapacity(1000), 180.0)
    assert rig.admission.programs_in_time is None, "no program has a place"
    for name in "abc":
        rig.on_arrival(0.0, ProgramId(name), 300)
        rig.admission.admit(0.0, idle=name == "a")
    rig.on_pause(1.0, ProgramId("a"), 300, 5.0)
    rig.add_request(ProgramId("~1"), 100)
    assert rig.programs.live == 3 and rig.admission.programs_in_time is not None
    rig.programs.expire_away(100.0)
    assert rig.programs.live == 2, "it is late, and may have ended"


def test_the_more_of_its_programs_an_engine_cannot_serve_in_time_the_longer_is_its_line() -> None:
    """In memory for three programs, three are in time; of five, two stand in the line."""
    rig = AdmissionRig(KVCapacity(1000), 180.0)
    for number in range(5):
        rig.on_arrival(0.0, ProgramId(f"{number}"), 250)
        rig.admission.admit(0.0, idle=number == 0)
    in_time = rig.admission.programs_in_time
    assert in_time is not None and rig.programs.live == 5
    assert in_time == pytest.approx(rig.programs.started, abs=1.0) and rig.admission.is_waited_for


def context(live: Sequence[float], in_time: Sequence[float], target: int = 2) -> Any:
    """What a policy function gets of replicas with these figures; of later ones only the first is known."""
    found = {LIVE: dict(enumerate(live)), IN_TIME: dict(enumerate(in_time))}
    return SimpleNamespace(aggregated_metrics=found, target_num_replicas=target)


def test_rays_autoscaler_gets_a_replica_more_before_those_there_are_full_and_fewer_after() -> None:
    assert replicas(context([10], [20]))[0] == 10 / 20 / FULL <= 1
    assert 1 < replicas(context([17], [20]))[0] <= 2
    assert 2 < replicas(context([30, 2], [20, 20]))[0] <= 3
    assert replicas(context([5, 5], [20, 20]))[0] <= 1


def test_the_page_asks_an_autoscaler_for_the_same_with_the_same_metrics() -> None:
    page = (Path(__file__).parents[1] / "docs" / "fleet.md").read_text()
    assert {LIVE, IN_TIME} <= {f"continuum_{key}" for key in METRICS}
    assert f'threshold: "{FULL}", query: sum({LIVE} / {IN_TIME})' in page


def test_a_replica_that_has_not_served_yet_asks_for_nothing() -> None:
    assert replicas(context([18, 0], [20]))[0] == replicas(context([18], [20]))[0]
    assert replicas(context([], []))[0] == replicas(context([0, 0], []))[0] == 2
    assert replicas(SimpleNamespace(aggregated_metrics=None, target_num_replicas=3))[0] == 3


def test_as_load_rises_the_signal_asks_for_a_replica_before_first_tokens_are_late_and_gives_it_back() -> None:
    """In the simulator, on vLLM's scheduler: four minutes of load that one replica cannot serve in time."""
    arrivals_s = ramp_s(seed=1, highest=0.9, lasts_s=240.0)
    shape = Shape(Lognormal(4, 1), Lognormal(6.0, 4.0), Lognormal(8_000, 2_000), "bash")
    programs = arriving(draw(shape, "ramp", len(arrivals_s), 1), arrivals_s)
    small, scaled = (
        replace(MACHINE, kv_tokens=32_768),
        Scaled(2, Autoscaler(up_s=0.0, down_s=20.0, start_s=15.0)),
    )
    with_it, alone = run(programs, scaled, 2, small), run(programs, Ours(), 1, small)
    late = [at_s for at_s in range(0, 240, 30) if p90_s(alone, at_s, at_s + 30.0) > 30.0]
    asked = [each.at_s for each in scaled.asked if each.wanted == 2]
    assert late and asked and asked[0] < late[0]
    assert max(p90_s(with_it, at_s, at_s + 30.0) for at_s in range(0, 240, 30)) < 15.0
    assert [scaled.asked[0].up, max(each.up for each in scaled.asked), scaled.asked[-1].up] == [1, 2, 1]
    said = in_words(scaled.asked, rows_of(scaled.asked, with_it, alone, every_s=30.0))
    assert said.startswith("P90 above 30 s: 0 of ") and " and 0 of one alone" not in said
