"""A client leaves, in any state of its request: over the fake and LMCache's server.

vLLM's real scheduler and, for LMCache, both halves of its real adapters (lmcache_bench.py). In every
state, the engine then serves the next request and all memory is free again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("lmcache")

from bench import Bench, prompt
from bench import settings as settings  # a fixture
from lmcache.v1.multiprocess.futures import MessagingFuture
from lmcache_bench import MpBench
from tier_bench import TierBench, check_books
from vllm.v1.request import RequestStatus
from waiting import PATIENCE_S

from continuum_lmcache.vllm_plugin.scheduler import ContinuumAsyncScheduler, ContinuumScheduler

BLOCKS = 24
KNOWN = prompt(100, 50)  # the tiers hold its whole blocks
ADAPTERS: dict[str, Callable[[Any, Path, Path], Bench]] = {
    "fake": lambda cls, model, _: TierBench(cls, model, BLOCKS, 400),
    "mp": lambda cls, model, folder: MpBench(cls, model, BLOCKS, folder),
}
CLASSES = [ContinuumScheduler, ContinuumAsyncScheduler]


@pytest.fixture
def make(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: Any,
) -> Iterator[Callable[[str, Any], Bench]]:
    """A bench over an adapter, whose tiers hold KNOWN and whose GPU does not."""
    monkeypatch.setenv("LMCACHE_TRACK_USAGE", "false")
    settings(policy="continuum")
    made: list[Any] = []

    def build(adapter: str, cls: Any) -> Bench:
        bench = ADAPTERS[adapter](cls, model, tmp_path)
        made.append(bench)
        bench.turn(None, KNOWN)
        settle(bench)
        return bench

    yield build
    for bench in made:
        bench.close() if hasattr(bench, "close") else bench.scheduler.shutdown()


def settle(bench: Bench) -> None:
    """End every request, its stores and all pins; then nothing may hold a block."""
    bench.run_until_idle()
    bench.advance(1000.0)
    check_books(bench)
    assert bench.used_blocks == 0 and not bench.scheduler.requests and not bench.engine.turns
    bench.scheduler.reset_prefix_cache()


def until(bench: Bench, reached: Callable[[], Any]) -> None:
    """Step until the condition holds."""
    end_s = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < end_s, f"it never came to be so: {bench.scheduler.requests}"
        bench.step(0.01)


def leave(bench: Bench, request_id: str) -> None:
    """The client leaves."""
    bench.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
    check_books(bench)


def leave_within_step(bench: Bench, request_id: str, reached: Callable[[Any], bool]) -> None:
    """The client leaves while the worker runs the first step for which `reached` holds."""
    left: list[str] = []
    after = bench.scheduled

    def scheduled(output: Any) -> None:
        after(output)
        if not left and reached(output):
            left.append(request_id)
            leave(bench, request_id)

    bench.scheduled = scheduled  # type: ignore[method-assign]
    until(bench, lambda: left)


def held(bench: Bench) -> None:
    for i in range(60):
        bench.send(f"p{i}", prompt(100, i), out=4)
    bench.step()
    leave(bench, next(turn.id for turn in bench.engine.turns.values() if turn.in_line))


def waiting(bench: Bench) -> None:
    leave(bench, bench.send(None, KNOWN))


def blocked_head(bench: Bench) -> None:
    """First in line, looked up, and refused: a large one runs."""
    bench.send(None, prompt(300, 60), out=40)
    until(bench, lambda: bench.scheduler.running)
    request_id = bench.send(None, KNOWN)
    for _ in range(6):
        bench.step(0.01)
        time.sleep(0.005)  # a lookup's answer comes in real time
    assert bench.scheduler.running
    assert bench.scheduler.requests[request_id].status == RequestStatus.WAITING
    leave(bench, request_id)


def loading(bench: Bench) -> None:
    request_id = bench.send(None, KNOWN)
    leave_within_step(
        bench, request_id, lambda _: bench.scheduler.requests[request_id].num_computed_tokens > 0
    )


def running(bench: Bench) -> None:
    request_id = bench.send(None, KNOWN, out=50)
    until(bench, lambda: bench.scheduler.requests[request_id].num_output_tokens > 2)
    leave(bench, request_id)


def preempted(bench: Bench) -> None:
    request_id = bench.send(None, KNOWN, out=50)
    request = bench.scheduler.requests[request_id]
    until(bench, lambda: request.num_output_tokens > 2)
    while bench._in_flight:
        bench._deliver(*bench._in_flight.popleft())
    bench.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert request.status == RequestStatus.PREEMPTED
    leave(bench, request_id)


def storing(bench: Bench) -> None:
    request_id = bench.send(None, prompt(100, 61), out=5)
    leave_within_step(bench, request_id, lambda output: request_id in output.num_scheduled_tokens)


STATES = [held, waiting, blocked_head, loading, running, preempted, storing]


@pytest.mark.parametrize("cls", CLASSES, ids=["sync", "async"])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_client_leaves_in_any_state_and_the_engine_serves_on(
    make: Callable[[str, Any], Bench], adapter: str, cls: Any
) -> None:
    bench = make(adapter, cls)
    for state in STATES:
        plain = bench.scheduled
        state(bench)
        bench.scheduled = plain  # type: ignore[method-assign]
        assert bench.turn(None, prompt(64, 70))[-1] == 7, state.__name__
        settle(bench)


@pytest.mark.parametrize("cls", CLASSES, ids=["sync", "async"])
def test_a_client_leaves_while_its_load_takes_steps_and_nobody_gets_its_blocks_before_it_ends(
    make: Callable[[str, Any], MpBench], cls: Any
) -> None:
    """As on a GPU, where the MP server writes them beside the steps."""
    bench = make("mp", cls)
    load = held_back(bench)
    request_id = bench.send(None, KNOWN)
    until(bench, lambda: load.block_ids)
    leave(bench, request_id)
    pool = bench.scheduler.kv_cache_manager.block_pool
    for story in range(70, 75):
        other = bench.send(None, prompt(64, story))
        until(bench, lambda other=other: other in bench.done)
        assert all(pool.blocks[block].ref_cnt for block in load.block_ids), "freed while it is written"
    load.end()
    settle(bench)


class HeldBack:
    """The next load: asked for and not answered until `end`."""

    def __init__(self) -> None:
        self.block_ids: list[int] = []
        self.future: MessagingFuture[bool] = MessagingFuture()

    def end(self) -> None:
        self.future.set_result(True)


def held_back(bench: MpBench) -> HeldBack:
    load = HeldBack()
    context = bench.worker.worker_adapter.transfer_ctx

    def submit(*args: Any, **_: Any) -> MessagingFuture[bool]:
        load.block_ids = [block for group in args[3] for block in group]
        return load.future

    context.submit_retrieve = submit
    return load
