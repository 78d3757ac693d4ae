"""vLLM's own offloading below the GPU, on the oracle's GPU (kv_oracle_native.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm

pytest.importorskip("lmcache")

from bench import Bench, prompt
from kv_oracle_native import CHUNK, CHUNKS, NativeBench
from layer_kinds import FULL, WINDOW
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.lora.request import LoRARequest
from vllm.v1.core import kv_cache_utils
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import RequestStatus

from connectors.native.connector import ContinuumOffloadingConnector
from continuum_lmcache.errors import ConfigError
from continuum_lmcache.types import Tier
from continuum_lmcache.vllm_plugin.scheduler import ContinuumAsyncScheduler, ContinuumScheduler

Make = Callable[..., NativeBench]


@pytest.fixture(params=[ContinuumScheduler, ContinuumAsyncScheduler])
def make(request: Any, model: Path, settings: Any) -> Make:
    settings(policy="fcfs")
    return lambda **more: NativeBench(request.param, model, True, **{"blocks": 60, **more})


def test_a_turn_loads_what_the_cpu_holds_and_the_scheduler_counts_and_times_it(make: Make) -> None:
    bench = make()
    tokens = prompt(3 * CHUNK + 5)
    first = bench.turn("a", tokens, out=2 * CHUNK)
    bench.scheduler.reset_prefix_cache()
    bench.turn("a", first + prompt(9, 2))
    residency, held_tokens = bench.parts.residency, len(first) // CHUNK * CHUNK
    assert residency.mode == "native" and residency.store.capacity_tokens()
    assert residency.prompt_tokens["dram"] == held_tokens > len(tokens), "outputs are stored too"
    assert bench.engine.learned.rates.samples["dram"] == bench.lmcache.loads == 1
    assert bench.scheduler.connector.capacity_tokens() == {Tier.DRAM: CHUNKS * CHUNK}
    assert bench.compared > 0


def test_a_load_that_does_not_pay_is_not_made(make: Make) -> None:
    bench = make()
    tokens = prompt(3 * CHUNK + 5)
    asked = []
    bench.scheduler.connector.set_load_selector(lambda _, where: asked.append(where) or 0)
    for _ in range(2):
        bench.turn("a", tokens)
        bench.scheduler.reset_prefix_cache()
    assert bench.lmcache.loads == 0
    assert {(where.dram_tokens, where.ssd_tokens) for where in asked} == {(3 * CHUNK, 0)}


def a_session_goes_on(bench: NativeBench) -> None:
    session = bench.send(None, prompt(CHUNK + 5), 3, resumable=True)
    for story in (1, 2):
        while bench.scheduler.requests[session].status != RequestStatus.WAITING_FOR_STREAMING_REQ:
            bench.step()
        bench.go_on(session, prompt(3 * CHUNK, story), 3)
    bench.step()
    bench.step()
    bench.step()


def weights_change_beside_a_request(bench: NativeBench) -> None:
    bench.send("a", prompt(CHUNK), CHUNK)
    for _ in range(CHUNK // 2):
        bench.step()
    worker = SimpleNamespace(collective_rpc=lambda *_: bench.new_weights())
    engine: Any = SimpleNamespace(scheduler=bench.scheduler, model_executor=worker)
    EngineCore.collective_rpc(engine, "reload_weights")
    EngineCore.collective_rpc(engine, "reload_weights")  # before the next step
    bench.run_until_idle()
    bench.scheduler.reset_prefix_cache()
    bench.turn("b", bench.done["a-1"])


def a_preempted_request_loads_in_the_next_step(bench: NativeBench) -> None:
    bench.send("a", prompt(3 * CHUNK), CHUNK)
    for _ in range(6):
        bench.step()
    bench.preempt_all()
    bench.step()
    assert bench.lmcache.loads == 1
    bench.run_until_idle()


MENDED_IN_0_33 = {a_session_goes_on, a_preempted_request_loads_in_the_next_step}  # by vLLM itself
MENDS = {
    a_session_goes_on: ("_restart", lambda *_: None),
    weights_change_beside_a_request: ("reset_cache", OffloadingConnector.reset_cache),
    a_preempted_request_loads_in_the_next_step: (
        "build_connector_meta",
        OffloadingConnector.build_connector_meta,
    ),
}


@pytest.mark.parametrize("happens", MENDS)
@pytest.mark.parametrize("is_mended", [True, False])
def test_faults_of_vllms_offloading_are_mended_and_are_found_without_the_mend(
    make: Make, happens: Any, is_mended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    if not is_mended:
        monkeypatch.setattr(ContinuumOffloadingConnector, *MENDS[happens])
    has_fault = happens not in MENDED_IN_0_33 or vllm.__version__.startswith(("0.30.", "0.31.", "0.32."))
    if is_mended or not has_fault:
        happens(bench)
        return
    with pytest.raises(AssertionError):
        happens(bench)


def test_a_store_below_the_cpu_is_refused_as_it_outlives_the_weights(model: Path, settings: Any) -> None:
    settings(policy="fcfs")
    tiers = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [{"type": "fs", "root_dir": "/tmp/kv"}]}
    with pytest.raises(ConfigError, match="spec_name TieringOffloadingSpec.*would be read; remove it"):
        NativeBench(ContinuumScheduler, model, True, settings=tiers)


def test_a_model_with_several_kinds_of_layers_counts_as_without_tiers(model: Path, settings: Any) -> None:
    settings(policy="fcfs")
    transfer = {
        "kv_connector": "ContinuumOffloadingConnector",
        "kv_connector_module_path": "connectors.native.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20},
    }
    bench = Bench(ContinuumScheduler, model, 60, transfer=transfer, spec=[FULL, WINDOW])
    assert not bench.parts.residency.store.capacity_tokens()


@pytest.mark.parametrize("is_mended", [True, False])
def test_an_adapter_that_is_loaded_again_finds_no_kv_of_its_old_weights(
    make: Make, is_mended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the GPU or below it. A server gives it another id, and the same name and path, which are all
    that vLLM's own names of blocks have."""
    bench = make()
    if not is_mended:
        lora_keys = lambda request: [("lora", request.lora_request.lora_name, request.lora_request.lora_path)]  # noqa: E731
        monkeypatch.setattr(kv_cache_utils, "_gen_lora_extra_hash_keys", lora_keys)
    old, new = (LoRARequest("a", number, "/adapters/a") for number in (1, 2))
    tokens = prompt(3 * CHUNK + 5)
    bench.turn("a", tokens, lora=old)
    bench.turn("a", tokens, out=2, lora=old)
    bench.scheduler.reset_prefix_cache()
    bench.turn("a", tokens, out=2, lora=old)
    assert bench.lmcache.loads == 1
    bench.new_weights()  # those of the new id
    if not is_mended:
        with pytest.raises(AssertionError, match="KV of other"):
            bench.turn("a", tokens, out=2, lora=new)
        return
    bench.turn("a", tokens, out=2, lora=new)
    bench.scheduler.reset_prefix_cache()
    bench.turn("a", tokens, out=2, lora=new)
    assert bench.lmcache.loads == 2
