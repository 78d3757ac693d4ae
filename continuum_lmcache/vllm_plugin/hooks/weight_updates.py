"""Tells the scheduler of calls that may change weights: vLLM's (reload_weights, update_weights), those of
trainers' worker extensions, an adapter that replaces itself, a trainer's word that it has changed them.
Sleep and pause reset the connector's cache themselves.

Seams, unchanged from vLLM 0.30 to 0.33, which run between two steps: EngineCore.collective_rpc, .add_lora
and .set_weight_version.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from continuum_lmcache.vllm_plugin.hooks import wrapping

READS = re.compile(r"_*(get|is|has|list|check|compute|report|save|dump|log|profile)(_|$)")
MAY_CHANGE: Mapping[str, Callable[..., bool]] = {  # by EngineCore's method: whether its arguments say so
    "collective_rpc": lambda method, *_, **__: not (isinstance(method, str) and READS.match(method)),
    "add_lora": lambda lora_request: bool(lora_request.load_inplace),
    "set_weight_version": lambda weight_version: True,  # noqa: ARG005
}


def install() -> None:
    """Once a process, when our scheduler is built."""
    from vllm.v1.engine.core import EngineCore

    for name, may_change in MAY_CHANGE.items():
        _note_before(EngineCore, name, may_change)


def _note_before(engine: Any, name: str, may_change: Callable[..., bool]) -> None:
    stock = getattr(engine, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        note = getattr(getattr(self, "scheduler", None), "on_new_weights", None)  # none while it begins
        if note is not None and may_change(*args, **kwargs):
            note()
        return stock(self, *args, **kwargs)

    call.__name__ = name
    wrapping.hook(engine)(call)
