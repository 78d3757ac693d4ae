"""Degraded mode: a stock connector behind vLLM's own scheduler, known only by what it brings and when."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench import BLOCK, Bench, prompt, settings  # noqa: F401

from continuum_lmcache.appraise import Appraiser
from continuum_lmcache.config import ContinuumConfig
from continuum_lmcache.hearsay import Hearsay
from continuum_lmcache.identity import Identity
from continuum_lmcache.recorder import Recorder
from continuum_lmcache.types import ProgramId, TurnId
from continuum_lmcache.vllm_plugin.metrics import detach
from continuum_lmcache.vllm_plugin.scheduler import ContinuumScheduler
from continuum_lmcache.vllm_plugin.supply import Supply
from continuum_lmcache.vllm_plugin.turns import LiveTurn
from continuum_lmcache.vllm_plugin.witness import Witness

COMPUTE_S, LOAD_S = 1e-3, 1e-4  # a token


def seconds_of(bench: Bench) -> Callable[[Any], float]:
    """A step takes its tokens' time, and that of what the connector brings with it."""

    def seconds(output: Any) -> float:
        loaded = sum(bench.keeper.turns[new.req_id].loaded_tokens for new in output.scheduled_new_reqs)
        return COMPUTE_S * output.total_num_scheduled_tokens + LOAD_S * loaded

    return seconds


@pytest.fixture
def bench(model: Path, settings: Any) -> Bench:  # noqa: F811
    settings(policy="program-fcfs")
    transfer = {
        "kv_connector": "StockConnector",
        "kv_connector_module_path": "stock_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"stock.share": 0.5},
    }
    made = Bench(ContinuumScheduler, model, blocks=60, transfer=transfer)
    made.step_seconds = seconds_of(made)
    return made


def returns(bench: Bench, rounds: int) -> None:
    """Two programs in turn, of which the GPU holds one: each return finds half of its context outside."""
    stories = {name: prompt(40 * BLOCK, i) for i, name in enumerate("ab", 1)}
    for number in range(rounds):
        bench.turn(None, prompt(20 * BLOCK, 20 + number))  # something that nobody has seen
        for name, tokens in stories.items():
            stories[name] = bench.turn(name, tokens) + prompt(BLOCK, 9)


def test_hit_share_and_load_rate_are_learned_from_what_returns_brought(bench: Bench) -> None:
    returns(bench, 12)
    heard = bench.keeper.supply.hearsay
    assert heard.returns >= 20
    assert heard.share == pytest.approx(0.5, abs=0.1)
    costs = bench.keeper.appraiser.rates.costs
    assert costs.prefill_s(400) == pytest.approx(400 * COMPUTE_S, rel=0.25)
    assert costs.dram.samples >= 20
    tokens = 320
    assert costs.dram.seconds(tokens * costs.kv_bytes_per_token) == pytest.approx(tokens * LOAD_S, rel=0.25)


def test_the_mode_and_the_share_are_in_the_metrics_with_their_samples(bench: Bench) -> None:
    returns(bench, 5)
    bench.step()
    totals: dict[str, Any] = {}  # as a front-end has them in the end
    for stats in bench.stats:
        for key, news in detach(stats).items():
            totals.setdefault(key, {}).update(news)
    assert totals["residency"] == {"store": 0.0, "learned": 1.0, "none": 0.0}
    assert 0.3 < totals["hit_share"][""] < 0.7
    assert totals["rate_samples"]["hit_share"] == bench.keeper.supply.hearsay.returns
    assert totals["rate_samples"]["dram"] > 0


def test_a_connector_that_brings_half_halves_what_a_pin_is_worth(bench: Bench) -> None:
    returns(bench, 12)
    last = departures(bench)[-1]
    lost_s = last["context_tokens"] * COMPUTE_S
    assert last["retention"]["reload_s"] == pytest.approx(
        0.5 * lost_s + 0.5 * lost_s * LOAD_S / COMPUTE_S, rel=0.25
    )


def departures(bench: Bench) -> list[dict[str, Any]]:
    events = [event for told in bench.keeper.recorder.snapshot().values() for event in told]
    found = [event for event in events if "Request_departure_time" in event]
    return sorted(found, key=lambda event: event["Request_departure_time"])


def test_a_load_beside_the_steps_is_timed_from_its_blocks_to_its_first_step() -> None:
    appraiser = Appraiser(ContinuumConfig())
    bytes_per_token = appraiser.rates.costs.kv_bytes_per_token
    witness = Witness(appraiser, Recorder(0.0), Supply(None, Hearsay()))
    idle = SimpleNamespace(total_num_scheduled_tokens=0, num_scheduled_tokens={})
    for number in range(50):
        turn = LiveTurn(TurnId(f"t{number}"), ProgramId("p"), Identity(), 0.0, 0.0, 0, loaded_tokens=1000)
        witness.placed(10.0 * number, turn, prompt_tokens=1200, loads_async=True)
        witness.started(10.0 * number + 0.5, turn, context_tokens=1000)
        witness.stepped(10.0 * number + 0.6, idle)
    rate = appraiser.rates.costs.dram
    assert rate.samples == 50
    assert rate.seconds(1000 * bytes_per_token) == pytest.approx(0.5, rel=0.05)
