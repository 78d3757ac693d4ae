"""Which calls of a running engine count as a change of its weights (hooks/weight_updates.py)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from bench import Bench, prompt
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.lora.request import LoRARequest
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.engine.core import EngineCore

from continuum_lmcache.vllm_plugin.hooks import weight_updates

Make = Callable[..., Bench]


class Engine(EngineCore):
    """vLLM's engine, of which only these calls run."""

    def __init__(self) -> None:
        self.changes, self.adapters = list[str](), list[str]()
        changes_so_far = lambda *_: len(self.changes)  # noqa: E731
        self.model_executor: Any = SimpleNamespace(
            collective_rpc=changes_so_far, add_lora=changes_so_far, remove_lora=changes_so_far
        )


@pytest.fixture
def engine() -> Iterator[Engine]:
    weight_updates.install()
    engine = Engine()
    engine.scheduler = SimpleNamespace(  # type: ignore[assignment]
        on_new_weights=engine.changes.append, on_adapter=lambda lora: engine.adapters.append(lora.lora_name)
    )
    return engine


@pytest.mark.parametrize(
    "method",
    [
        *("reload_weights", "update_named_param", "sync", "receive_from_trainer", "refit", "_swap_model"),
        *("init_weights_update_group", "syncWeights", "load", "synchronize_weights", "echo_params_and_set"),
        *("check_and_load_weights", "get_or_update", "debug_set_param", "probe_then_merge", "new_name", len),
    ],
)
def test_a_call_of_the_workers_counts_as_a_change_before_it_begins(engine: Engine, method: Any) -> None:
    """Trainers' worker extensions have names of their own; an unknown one may be a trainer's."""
    assert engine.collective_rpc(method) == 1  # type: ignore[comparison-overlap]
    assert engine.changes == [method if isinstance(method, str) else "len"]


def is_ready() -> None:
    """A call may be a function too."""


@pytest.mark.parametrize(
    "method",
    [
        *("get_weight_version", "is_ready", "list_params", "compute_weight_checksums", "_report_load"),
        *(
            "liveness_probe",
            "livenessProbe",
            "health",
            "worker_health_check",
            "ping",
            "probe",
            "echo",
            "is_alive",
        ),
        *(
            "alive",
            "keep_alive",
            "heartbeat",
            "synchronize",
            "cuda_synchronize",
            "synchronize_device",
            "debug",
        ),
        *("debug_print", "print_weights", "dry_run", "noop", "no_op", "do_nothing", "check_health_and_ping"),
        is_ready,
    ],
)
def test_a_call_that_only_reads_by_its_name_changes_nothing(engine: Engine, method: Any) -> None:
    assert engine.collective_rpc(method=method) == 0  # type: ignore[comparison-overlap]


def test_an_adapter_that_replaces_itself_or_is_removed_is_a_change_and_a_new_one_is_none(
    engine: Engine,
) -> None:
    """One that is removed is read again from its files, under the same id too."""
    engine.add_lora(LoRARequest("a", 1, "/adapters/a"))
    assert engine.changes == [] and engine.adapters == ["a"]
    engine.add_lora(LoRARequest("a", 1, "/adapters/a", load_inplace=True))
    engine.remove_lora(1)
    assert engine.changes == ["load_inplace", "remove_lora"]


def test_workers_activate_both_loads_of_one_adapters_name_while_turns_of_both_run(make: Make) -> None:
    """They keep a step's adapters in a set, in which vLLM compares names alone: of two loads of one name one
    was missing, and its turns ended the engine (KeyError). Found by experiments.trust.live_rounds."""
    loads = [LoRARequest("a", number, "/adapters/a") for number in (1, 2)]
    assert len(set(loads)) == 1, "stock vLLM tells them apart: the mend can go"
    bench, sent = make(), list[LoRARequest]()
    bench.scheduled = lambda output: sent.extend(new.lora_request for new in output.scheduled_new_reqs)  # type: ignore[method-assign]
    for number, load in enumerate(loads):
        bench.send(f"p{number}", prompt(40, number), out=2, lora=load)
    bench.step()
    assert len(set(sent)) == 2 and {each.lora_int_id for each in sent} == {1, 2}


def test_an_adapters_blocks_are_named_by_its_id_too() -> None:
    """A server gives another one to an adapter of the same name and path that is loaded again."""
    weight_updates.install()

    def key(lora: LoRARequest | None) -> Any:
        request: Any = SimpleNamespace(lora_request=lora, mm_features=[], cache_salt=None, prompt_embeds=None)
        return generate_block_hash_extra_keys(request, 0, 16, 0)[0]

    keys = {key(LoRARequest(name, number, path)) for name in "ab" for number in (1, 2) for path in "pq"}
    assert len(keys) == 8 and key(None) is None
    assert all(each[0][1] in "ab" for each in keys), "its name, which vLLM's events tell"


def test_a_request_that_loads_its_adapter_in_place_is_a_change(make: Make) -> None:
    bench = make()
    request: Any = SimpleNamespace(lora_request=LoRARequest("a", 1, "/adapters/a", load_inplace=True))
    with pytest.raises(AttributeError):  # it has no more of a request
        bench.scheduler.add_request(request)
    assert bench.parts.new_weights == {"load_inplace": 1}


def test_a_server_asks_for_a_load_in_place_once() -> None:
    """vLLM up to 0.32 would ask again with each request: workers would read the files in each step."""
    weight_updates.install_in_api_server()
    serving: Any = object.__new__(OpenAIServingModels)
    serving.lora_requests, asked = {}, []

    async def add_lora(lora: LoRARequest) -> None:
        asked.append(lora.load_inplace)

    async def is_right(request: Any) -> None:
        pass

    serving.engine_client = SimpleNamespace(add_lora=add_lora)
    serving.lora_resolver_lock = {"a": asyncio.Lock()}
    serving.lora_id_counter = SimpleNamespace(inc=lambda _: 1)
    serving._check_load_lora_adapter_request = is_right
    wanted: Any = SimpleNamespace(lora_name="a", lora_path="p", load_inplace=True, is_3d_lora_weight=False)
    for _ in range(2):
        asyncio.run(serving.load_lora_adapter(wanted))
        assert not serving.lora_requests["a"].load_inplace
    assert asked == [True, True]


def test_a_trainers_word_counts_whatever_way_the_weights_came(engine: Engine) -> None:
    engine.set_weight_version("check 12")
    assert engine.changes == ["set_weight_version"]


def test_an_engine_that_begins_has_no_scheduler_to_tell(engine: Engine) -> None:
    """A second one in a process calls its workers before."""
    del engine.scheduler
    assert engine.collective_rpc("update_max_model_len") == 0  # type: ignore[comparison-overlap]


def call(bench: Bench, method: str) -> None:
    worker: Any = SimpleNamespace(scheduler=bench.scheduler, model_executor=SimpleNamespace())
    worker.model_executor.collective_rpc = lambda *_: None
    EngineCore.collective_rpc(worker, method)


def test_what_drops_kv_is_counted_and_said_once_by_its_name(make: Make, logged: Any) -> None:
    bench, warned = make(), logged(weight_updates)
    for method in ("reload_weights", "hello_world", "is_ready", "new_name", "new_name"):
        call(bench, method)
    bench.scheduler.reset_prefix_cache(reset_connector=True)
    bench.scheduler.reset_prefix_cache()
    assert bench.parts.new_weights == {"reload_weights": 1, "new_name": 2, "reset_prefix_cache": 1}
    assert [line.split()[0] for line in warned] == ["reload_weights", "new_name", "reset_prefix_cache"]
    bench.turn("a", prompt(20))
    told: Counter[str] = Counter()
    for stats in bench.stats:
        told.update((stats.kv_connector_stats or {}).get("continuum", {}).get("new_weights", {}))
    assert told == bench.parts.new_weights


def test_names_without_end_are_one_sum(make: Make, logged: Any) -> None:
    bench, warned = make(), logged(weight_updates)
    for number in range(weight_updates.MOST_CALLS + 9):
        call(bench, f"new_name_{number}")
    assert len(bench.parts.new_weights) == len(warned) == weight_updates.MOST_CALLS + 1
    assert bench.parts.new_weights["other"] == 9


def test_a_call_that_the_settings_name_as_one_that_reads_drops_nothing(make: Make) -> None:
    bench = make(policy="static-ttl", static_ttl_s=60, reading_calls="new_name, other_name")
    tokens = bench.turn("a", prompt(100))
    call(bench, "new_name")
    assert bench.engine.pins.pinned and not bench.parts.new_weights
    call(bench, "new_names")
    assert not bench.engine.pins.pinned and bench.parts.new_weights == {"new_names": 1}
    bench.turn("a", tokens)
