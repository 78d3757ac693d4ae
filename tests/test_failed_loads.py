"""After a failed asynchronous KV load a request has no KV, and no request waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench import prompt
from tier_bench import TierBench
from vllm.v1.core.sched.scheduler import Scheduler

from continuum_lmcache.vllm_plugin.scheduler import ContinuumAsyncScheduler, ContinuumScheduler

STOCK_WAITS = pytest.mark.xfail(
    strict=True, reason="vLLM 0.30 to 0.33: a retry waits for what it, or those behind it, have reserved"
)
CLASSES = [ContinuumScheduler, ContinuumAsyncScheduler, pytest.param(Scheduler, marks=STOCK_WAITS)]

Make = Callable[[Any], TierBench]


@pytest.fixture
def make(model: Path, settings: Any) -> Make:
    settings(policy="fcfs")
    return lambda cls: TierBench(cls, model, blocks=24, tier_blocks=96)


@pytest.mark.parametrize("cls", CLASSES)
def test_a_request_beyond_half_of_the_memory_is_served_after_its_whole_load_failed(
    cls: Any, make: Make
) -> None:
    bench = make(cls)
    tokens = prompt(13 * 16 + 5)
    bench.turn("a", tokens)
    bench.scheduler.reset_prefix_cache()
    bench.failing = 1
    again = bench.send("a", tokens)
    for _ in range(60):
        bench.step()
    assert bench.failed == 1 and again in bench.done


@pytest.mark.parametrize("cls", CLASSES[:2])
def test_a_failed_asynchronous_load_evicts_no_block(
    cls: Any, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of its blocks is in the prefix cache yet, and vLLM's own tests count the calls."""
    bench, evicted = make(cls), list[set[int]]()
    tokens = prompt(6 * 16 + 5)
    bench.turn("a", tokens)
    bench.scheduler.reset_prefix_cache()
    bench.failing = 1
    bench.send("a", tokens)
    monkeypatch.setattr(bench.scheduler.kv_cache_manager, "evict_blocks", evicted.append)
    for _ in range(20):
        bench.step()
    assert bench.failed == 1 and not evicted


@pytest.mark.parametrize("cls", CLASSES)
def test_loads_that_came_run_before_the_retry_of_one_that_failed(cls: Any, make: Make) -> None:
    """The retry needs the memory that is reserved for them, and they are after it in the queue."""
    bench = make(cls)
    wanted = {"a": (5, 10), "b": (2, 4), "c": (6, 15)}  # blocks that the tier has, of so many
    prompts = {job: prompt(whole * 16 - 4, story) for story, (job, (_, whole)) in enumerate(wanted.items())}
    for job, (held, _) in wanted.items():
        bench.turn(job, prompts[job][: held * 16 + 1])
    bench.scheduler.reset_prefix_cache()
    bench.failing = 1
    again = {bench.send(job, prompts[job]) for job in wanted}
    for _ in range(60):
        bench.step()
    assert bench.failed == 1 and again <= set(bench.done)
