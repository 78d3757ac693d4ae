"""A connector that does not report where KV is, behind vLLM's own scheduler: priced as no tier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench import BLOCK, Bench, prompt

from continuum_lmcache.vllm_plugin import assembly
from continuum_lmcache.vllm_plugin.hooks.prometheus import detach

COMPUTE_S, LOAD_S = 1e-3, 1e-4  # a token
TRANSFER = {
    "kv_connector": "StockConnector",
    "kv_connector_module_path": "stock_connector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"stock.share": 0.5},
}


def seconds_of(bench: Bench, load_s: float = LOAD_S) -> Callable[[Any], float]:
    """A step takes the time of its tokens and of the connector's loads."""

    def seconds(output: Any) -> float:
        loaded = sum(bench.engine.turns[new.req_id].loaded_tokens for new in output.scheduled_new_reqs)
        return COMPUTE_S * output.total_num_scheduled_tokens + load_s * loaded

    return seconds


@pytest.fixture
def bench(make: Any, tmp_path: Path) -> Bench:
    made: Bench = make(60, transfer=TRANSFER, policy="program-fcfs", run_output_dir=tmp_path)
    made.step_seconds = seconds_of(made)
    return made


def returns(bench: Bench, rounds: int) -> None:
    """Two programs in turn, of which the GPU holds one: each return finds half of its context outside."""
    stories = {name: prompt(40 * BLOCK, i) for i, name in enumerate("ab", 1)}
    for number in range(rounds):
        bench.turn(None, prompt(20 * BLOCK, 20 + number))  # new tokens, in no cache
        for name, tokens in stories.items():
            stories[name] = bench.turn(name, tokens) + prompt(BLOCK, 9)


def test_what_it_may_hold_does_not_cheapen_a_reload(bench: Bench) -> None:
    returns(bench, 12)
    last = departures(bench)[-1]
    lost_s = last["context_tokens"] * COMPUTE_S
    assert last["retention"]["reload_s"] == pytest.approx(lost_s, rel=0.25)


def test_a_step_that_may_wait_for_its_loads_teaches_nothing_of_the_prefill(bench: Bench) -> None:
    bench.step_seconds = seconds_of(bench, load_s=100 * COMPUTE_S)
    returns(bench, 12)
    rates = bench.engine.learned.rates
    assert rates.costs.prefill_s(400) == pytest.approx(400 * COMPUTE_S, rel=0.25)
    assert rates.samples["prefill"] > 0 and rates.samples["dram"] == 0


def test_its_kind_is_in_the_metrics(bench: Bench) -> None:
    returns(bench, 1)
    bench.step()
    sent = [detach(stats) for stats in bench.stats]
    assert {"unknown": 1.0} in [each.get("tier_store_info") for each in sent]
    assert not any("tier_store_up" in each for each in sent), "there is no tier to be up"


def test_one_warning_says_so_at_the_start(make: Any, logged: Any) -> None:
    said = logged(assembly)
    make(60, transfer=TRANSFER, policy="program-fcfs")
    assert [text for text in said if "StockConnector does not report where KV is" in text] == said[-1:]


def departures(bench: Bench) -> list[dict[str, Any]]:
    events = [event for told in bench.parts.files.recorder.snapshot().values() for event in told]
    found = [event for event in events if "Request_departure_time" in event]
    return sorted(found, key=lambda event: event["Request_departure_time"])
