"""Storing with in-process LMCache never stops where others may read the store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("lmcache")

from bench import BLOCK, prompt
from bench import settings as settings  # a fixture
from lmcache_bench import InProcessBench, one_rank
from lmcache_rig import Clock
from waiting import wait_for

from continuum_lmcache.reload.tier_store import KVTransfer
from continuum_lmcache.types import Tier
from continuum_lmcache.vllm_plugin.scheduler import ContinuumScheduler

Make = Callable[..., InProcessBench]


@pytest.fixture
def make(model: Path, monkeypatch: pytest.MonkeyPatch, settings: Any) -> Iterator[Make]:
    monkeypatch.setenv("LMCACHE_TRACK_USAGE", "false")
    made: list[InProcessBench] = []

    def build(**extra: Any) -> InProcessBench:
        settings(policy="continuum")
        made.append(InProcessBench(ContinuumScheduler, model, 40, **extra))
        return made[-1]

    with one_rank():
        yield build
        for bench in made:
            bench.close()


def test_a_remote_backend_is_always_stored_to_and_its_time_is_no_tiers(make: Make, tmp_path: Path) -> None:
    bench = make(**{"lmcache.remote_url": f"fs://localhost:0{tmp_path}"})
    bench.turn("p", prompt(100))
    wait_for(lambda: len(list(tmp_path.glob("*.data"))) == 6)
    forget_but(bench, 3)
    clock, told = slow_remote(bench)
    bench.turn("q", prompt(100))
    assert bench.lifecycle.residency.prompt_tokens["none"] == 104, "the second prompt was loaded"
    loads = [each for each in told if each.direction == "load"]
    assert [(load.tier, load.tokens, load.duration_s) for load in loads] == [(Tier.DRAM, 3 * BLOCK, 0.0)]
    assert clock.now_s == 10.0


def forget_but(bench: InProcessBench, chunks: int) -> None:
    """The GPU holds nothing any more, and DRAM the prompt's first chunks."""
    engine = bench.worker._impl.lmcache_engine
    keys = [key for _, _, key in engine.token_database.process_tokens(prompt(100))]
    for key in keys[chunks:]:
        engine.storage_manager.storage_backends["LocalCPUBackend"].remove(key)
    bench.advance(1000.0)
    bench.scheduler.reset_prefix_cache()


def slow_remote(bench: InProcessBench) -> tuple[Clock, list[KVTransfer]]:
    """Time advances only in reads of the remote backend; and the timer's transfers."""
    clock, told, meter = Clock(), [], bench.worker._worker._timer
    get, take, meter._clock = meter._get, meter.take, clock

    def taken() -> list[KVTransfer]:
        told.extend(found := take())
        return found

    def slow(keys: Any, location: str | None = None) -> Any:
        clock.now_s += 10.0 * (location == "RemoteBackend")
        return get(keys=keys, location=location)

    meter._get, meter.take = slow, taken
    return clock, told
