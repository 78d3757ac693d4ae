"""An engine's metrics: each event once, at any front-end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import prometheus_client
import pytest
from bench import BLOCK, Bench, prompt

from continuum_lmcache.telemetry.events import TurnArrived
from continuum_lmcache.telemetry.samples import MOST_SAMPLES, MetricSamples
from continuum_lmcache.types import ProgramId, TurnId
from continuum_lmcache.vllm_plugin.hooks.prometheus import METRICS, detach
from continuum_lmcache.vllm_plugin.metrics_delta import totals_of

Make = Callable[..., Bench]


def heard_by_front_ends(bench: Bench) -> list[Any]:
    """Every message of the bench's engine so far, as vLLM's front-ends would share them out."""
    return [detach(stats) for stats in bench.stats]


def test_what_two_front_ends_get_adds_up_to_what_happened(make: Make) -> None:
    bench = make(blocks=40)
    for story in range(4):
        first = bench.turn(f"p{story}", prompt(64, story), this_func_call="ls")
        bench.advance(1.0)
        bench.turn(f"p{story}", first + prompt(20, 9 + story), is_last_step=story % 2)
    bench.advance(60.0)
    bench.turn(None, prompt(32, 50))
    heard = heard_by_front_ends(bench)
    totals = totals_of(bench.parts)
    assert totals["pins"]["taken"] == 6
    for key in [key for key, metric in METRICS.items() if metric.kind is prometheus_client.Counter]:
        front_ends: list[Counter[str]] = [Counter(), Counter()]
        for i, told in enumerate(heard):
            front_ends[i % 2].update(told.get(key, {}))
        assert dict(front_ends[0] + front_ends[1]) == {k: v for k, v in totals[key].items() if v}, key
    gaps = [told["tool_gap_seconds"] for told in heard if "tool_gap_seconds" in told]
    samples = [s for by_tool in gaps for found in by_tool.values() for s in found]
    assert samples == pytest.approx([1.1] * 4), "a second away, and the step in which it was sent"


def test_an_engine_to_which_nothing_happens_reports_nothing_but_the_first_time(make: Make) -> None:
    bench = make()
    for _ in range(5):
        bench.step()
    heard = heard_by_front_ends(bench)
    assert heard[0].keys() <= METRICS.keys()
    assert {"pins", "pins_refused", "prompt_tokens", "pinned_blocks"} <= heard[0].keys()
    assert heard[0]["pins"]["expired"] == 0, "a count is shown as 0, not absent"
    assert heard[1:] == [{}] * 4


def test_where_there_is_no_tier_no_store_is_said_to_be_up(make: Make) -> None:
    bench = make()
    bench.turn("p", prompt(64))
    heard = heard_by_front_ends(bench)
    assert not any(each and "tier_store_up" in each for each in heard)
    assert any(each and each.get("tier_store_info") == {"none": 1.0} for each in heard)


def test_a_step_that_ends_an_engines_idleness_waits_for_no_figures(make: Make) -> None:
    bench = make(blocks=40)
    for story in range(3):
        bench.turn(f"p{story}", prompt(64, story), out=2)
        bench.now_s += 1.0
    told_at = [at for at, stats in enumerate(bench.stats) if stats.kv_connector_stats]
    assert told_at == [2, 5, 8], "of each turn's three steps the last"


def test_a_busy_engine_reports_every_half_second_and_the_rest_in_its_last_step(make: Make) -> None:
    bench = make(blocks=40)
    bench.send("p", prompt(64), out=33)
    bench.run_until_idle()
    told_at = [at for at, stats in enumerate(bench.stats) if stats.kv_connector_stats]
    assert told_at == [4, 9, 14, 19, 24, 29, len(bench.stats) - 1], "a step takes 0.1 s"
    last = heard_by_front_ends(bench)[-1]
    assert last["pinned_blocks"] == {"": bench.engine.pins.pinned_blocks} == {"": 6}
    assert last["pins"] == {"taken": 1}, "the turn's end is told before the engine idles"


def test_a_return_is_reported_with_where_its_context_was(make: Make) -> None:
    bench = make(blocks=20)
    first = bench.turn("p", prompt(64), out=17)
    bench.turn("p", first + prompt(10, 9), is_last_step=True)
    told = bench.parts.residency.returned_tokens
    assert told == {"gpu": 5 * BLOCK, "dram": 0, "ssd": 0, "none": len(first) - 5 * BLOCK}


def test_a_return_to_a_context_that_stayed_but_for_its_last_block_is_no_reload(make: Make) -> None:
    bench = make(blocks=40)
    first = bench.turn("p", prompt(64), out=17)
    bench.turn("p", first + prompt(80, 9), is_last_step=True)
    assert bench.parts.residency.returned_tokens["gpu"] == 5 * BLOCK < len(first)


def test_stats_without_our_news_are_left_alone() -> None:
    class Stats:
        kv_connector_stats = {"LMCache": {"hits": 1}}

    assert detach(Stats()) == {}
    assert Stats.kv_connector_stats == {"LMCache": {"hits": 1}}


def test_what_nobody_takes_is_bounded() -> None:
    seen = MetricSamples()
    for i in range(2 * MOST_SAMPLES):
        seen.add(TurnArrived(float(i), ProgramId("p"), TurnId(f"t{i}"), 1, ("ls",), float(i)))
    assert sum(map(len, seen.take_samples()["tool_gap_seconds"].values())) == MOST_SAMPLES
    assert seen.take_samples() == {}
