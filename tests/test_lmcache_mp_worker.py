"""The measured times of a worker's loads and stores with an MP server, on a GPU's timeline.

A move is submitted once the step's forward is launched, the server waits for that forward and for the moves
before it, and the worker asks whether it has ended once a step.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

pytest.importorskip("lmcache")

from lmcache.integration.vllm.vllm_multi_process_adapter import LoadStoreOp
from lmcache_mp_rig import Clock

from connectors.lmcache_mp.transfer_watch import WatchedFuture
from connectors.lmcache_mp.worker import MpWorkerSide

KV_BYTES = 131072  # a token
LINK_BYTES_PER_S = 25e9


class Done:
    """An event or a future that ends at a given time."""

    def __init__(self, clock: Clock, at_s: float) -> None:
        self._clock, self._at_s = clock, at_s

    def query(self) -> bool:
        return self._clock.now_s >= self._at_s

    def result(self, timeout: float | None = None) -> bool:  # noqa: ARG002
        return True


class Gpu:
    """An adapter whose forwards take `step_s`, two of them in flight, and whose server has one link."""

    is_healthy, transfer_ctx, req_client, _mq_timeout = True, None, None, 300.0

    def __init__(self, step_s: float) -> None:
        self.step_s, self.clock = step_s, Clock()
        self.forward_ends_s = self.link_free_s = 0.0
        self.retrieve_futures: dict[str, Any] = {}
        self.store_futures: dict[str, Any] = {}
        self.worker = MpWorkerSide(self, 0, KV_BYTES, 300.0, clock=self.clock)

    def submit_retrieve_request(self, request_id: str, op: Any, _: Any) -> None:
        self.retrieve_futures[request_id] = (self._moves(op), [])

    def submit_store_request(self, request_id: str, op: Any, _: Any) -> None:
        self.store_futures[request_id] = self._moves(op)

    def _moves(self, op: Any) -> Done:
        begin_s = max(self.forward_ends_s, self.link_free_s)
        self.link_free_s = begin_s + seconds(op.end - op.start)
        return Done(self.clock, self.link_free_s)

    def step(self, name: str, loads: int = 0, stores: int = 0) -> list[Any]:
        """Launch a forward, then submit; the next step comes when the previous forward has ended."""
        until_s = max(self.forward_ends_s, self.clock.now_s)
        self.forward_ends_s = until_s + self.step_s
        event = Done(self.clock, self.forward_ends_s)
        for tokens, submit in ((loads, self.worker.retrieve), (stores, self.worker.store)):
            if tokens:
                submit(name, LoadStoreOp([], [[]], 0, tokens), event)
        self.worker.poll()
        report = self.worker.report()
        while self.clock.now_s < until_s:  # the watching thread looks each millisecond
            self.clock.now_s += 0.001
            self.worker.watch.poll()
        return report.loads if report is not None else []


def seconds(tokens: int) -> float:
    return 0.001 + tokens * KV_BYTES / LINK_BYTES_PER_S


@pytest.mark.parametrize("step_s", [0.01, 0.06, 0.3])
def test_a_load_takes_what_the_link_takes_however_long_steps_are(step_s: float) -> None:
    gpu = Gpu(step_s)
    sizes = itertools.cycle([2048, 0, 8192, 0])
    moved = [each for k in range(60) for each in gpu.step(f"r{k}", loads=next(sizes))]
    assert len(moved) >= 20
    for each in moved:
        assert each.duration_s == pytest.approx(seconds(each.tokens), abs=0.0021), each


def test_a_load_that_queues_at_the_link_is_not_charged_with_the_stores_before_it() -> None:
    gpu = Gpu(0.3)
    moved = [each for k in range(30) for each in gpu.step(f"r{k}", loads=2048, stores=4096)]
    assert len(moved) >= 20
    for each in moved:
        assert each.duration_s == pytest.approx(seconds(each.tokens), abs=0.0021), each


def test_a_store_that_lmcache_leaves_out_is_not_taken_for_the_one_before_it() -> None:
    """It drops stores while the server is unhealthy, and keeps the request's last one."""
    gpu = Gpu(0.01)
    launched = Done(gpu.clock, 0.0)
    gpu.worker.store("r", LoadStoreOp([], [[]], 0, 1024), launched)
    gpu.worker._store = lambda *_: None
    gpu.worker.store("r", LoadStoreOp([], [[]], 1024, 3072), launched)
    assert [store.tokens for store in gpu.worker.watch.running] == [1024]


def test_a_future_is_asked_by_one_thread_at_a_time() -> None:
    """LMCache's imports the server's event when it is first asked, and two askers would both do it."""
    asked: list[bool] = []

    class Asked(Done):
        def query(self) -> bool:
            asked.append(watched._lock.locked())
            return True

    watched = WatchedFuture(Asked(Clock(), 0.0))
    assert watched.query() and watched.result(timeout=0) and asked == [True]
