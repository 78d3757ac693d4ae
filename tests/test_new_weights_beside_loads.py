"""Turns that wait with KV that a load has brought, when weights change or the engine pauses (kv_oracle.py).

None of that KV has run here: such a turn computes anew. Over LMCache's server, vLLM's own offloading, and the
simulator's connector.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lmcache")

from bench import BLOCK, prompt
from kv_oracle_fake import CHUNK, FakeBench
from kv_oracle_native import NativeBench
from kv_oracle_server import ServerBench, in_one_process
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request, RequestStatus

from continuum_lmcache.vllm_plugin.scheduler import (
    ContinuumAsyncScheduler,
    ContinuumMixin,
    ContinuumScheduler,
)

TOKENS = 4 * CHUNK + BLOCK + 1  # of the turn: what is loaded, and two blocks more
Loaded = Callable[[], tuple[Any, Request]]


def waits_with_loaded_kv(bench: Any, steps: int) -> Request | None:
    """A turn that comes some steps after a long answer began, which takes a further block while the turn
    loads: its load has ended, and there is no memory for its rest. None: it ran."""
    bench.turn("a", prompt(TOKENS))
    bench.scheduler.reset_prefix_cache()
    bench.lmcache.lag = 4
    bench.send("long", prompt(BLOCK, 9), 7 * BLOCK)
    for _ in range(steps):
        bench.step()
    request = bench.scheduler.requests[bench.send("b", prompt(TOKENS), 4)]
    while request.request_id not in bench.order:
        if request.status == RequestStatus.WAITING and request.num_computed_tokens:
            return request
        bench.step(0.01)
    return None


@pytest.fixture(params=[ContinuumScheduler, ContinuumAsyncScheduler])
def loaded(request: Any, kind: Any, model: Path, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Loaded:
    settings(policy="fcfs")
    in_one_process(monkeypatch)

    def build() -> tuple[Any, Request]:
        for steps in range(BLOCK // 2, BLOCK + 4):
            bench = kind(request.param, model, True, chunk=CHUNK, blocks=13)
            if (waiting := waits_with_loaded_kv(bench, steps)) is not None:
                return bench, waiting
        raise AssertionError("no such turn")

    return build


kinds = pytest.mark.parametrize("kind", [ServerBench, NativeBench, FakeBench])


def new_weights(bench: Any) -> None:
    worker = SimpleNamespace(collective_rpc=lambda *_: bench.new_weights())
    engine: Any = SimpleNamespace(scheduler=bench.scheduler, model_executor=worker)
    EngineCore.collective_rpc(engine, "reload_weights")


def pause(bench: Any) -> None:
    """vLLM's /pause?mode=keep: once the engine has no work it empties the caches, or the call fails."""
    bench.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    while bench.scheduler.has_requests() or bench._in_flight:
        bench.step()
    assert bench.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)


@kinds
def test_a_turn_that_waits_with_loaded_kv_computes_anew_after_new_weights(loaded: Loaded) -> None:
    bench, waiting = loaded()
    new_weights(bench)
    assert not waiting.num_computed_tokens
    bench.run_until_idle()
    bench.scheduler.reset_prefix_cache()
    bench.turn("c", prompt(TOKENS), out=4)
    assert bench.used_blocks == 0


@kinds
@pytest.mark.parametrize("is_mended", [True, False])
def test_an_engine_pauses_beside_a_turn_that_waits_with_loaded_kv(
    loaded: Loaded, is_mended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, waiting = loaded()
    if not is_mended:
        monkeypatch.setattr(ContinuumMixin, "_forget_loaded", lambda _: None)
        with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
            pause(bench)
        return
    pause(bench)
    assert bench.used_blocks == 0 and not waiting.num_computed_tokens
    bench.new_weights()
    bench.scheduler.set_pause_state(PauseState.UNPAUSED)
    bench.run_until_idle()
    bench.turn("c", prompt(TOKENS), out=4)


@pytest.mark.parametrize("kind", [ServerBench])
@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_pause_begins_when_loads_and_stores_under_way_have_ended(
    kind: Any, is_aborted: bool, model: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM would begin it at once, and answer 500 since memory is in use."""
    settings(policy="fcfs")
    in_one_process(monkeypatch)
    bench = kind(ContinuumAsyncScheduler, model, True, chunk=CHUNK, blocks=60)
    bench.turn("a", prompt(TOKENS))
    bench.scheduler.reset_prefix_cache()
    bench.lmcache.lag = 9
    loading = bench.scheduler.requests[bench.send("b", prompt(TOKENS), 4)]
    while loading.status != RequestStatus.WAITING_FOR_REMOTE_KVS:
        bench.step()
    if is_aborted:
        bench.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    pause(bench)
    assert bench.used_blocks == 0
    bench.new_weights()
    bench.scheduler.set_pause_state(PauseState.UNPAUSED)
    bench.run_until_idle()
    bench.turn("c", prompt(TOKENS), out=4)
