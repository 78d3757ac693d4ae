"""Which calls of a running engine count as a change of its weights (hooks/weight_updates.py)."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCore

from continuum_lmcache.vllm_plugin.hooks import weight_updates


class Engine(EngineCore):
    """vLLM's engine, of which only these calls run."""

    def __init__(self) -> None:
        self.changes = 0
        self.model_executor: Any = SimpleNamespace(
            collective_rpc=lambda *_: self.changes, add_lora=lambda _: self.changes
        )


@pytest.fixture
def engine() -> Iterator[Engine]:
    weight_updates.install()
    engine = Engine()

    def note() -> None:
        engine.changes += 1

    engine.scheduler = SimpleNamespace(on_new_weights=note)  # type: ignore[assignment]
    return engine


@pytest.mark.parametrize(
    "method",
    ["reload_weights", "update_named_param", "sync", "receive_from_trainer", "refit", "_swap_model", len],
)
def test_a_call_of_the_workers_counts_as_a_change_before_it_begins(engine: Engine, method: Any) -> None:
    """Trainers' worker extensions have names of their own."""
    assert engine.collective_rpc(method) == 1


@pytest.mark.parametrize(
    "method", ["get_weight_version", "is_ready", "list_params", "compute_weight_checksums", "_report_load"]
)
def test_a_call_that_only_reads_by_its_name_changes_nothing(engine: Engine, method: str) -> None:
    assert engine.collective_rpc(method=method) == 0


def test_an_adapter_that_replaces_itself_is_a_change_and_a_new_one_is_none(engine: Engine) -> None:
    """vLLM names an adapter's blocks by its name and path."""
    engine.add_lora(LoRARequest("a", 1, "/adapters/a"))
    assert engine.changes == 0
    engine.add_lora(LoRARequest("a", 1, "/adapters/a", load_inplace=True))
    assert engine.changes == 1


def test_a_trainers_word_counts_whatever_way_the_weights_came(engine: Engine) -> None:
    engine.set_weight_version("check 12")
    assert engine.changes == 1


def test_an_engine_that_begins_has_no_scheduler_to_tell(engine: Engine) -> None:
    """A second one in a process calls its workers before."""
    del engine.scheduler
    assert engine.collective_rpc("update_max_model_len") == 0
