"""Tells the scheduler of calls that may change weights: vLLM's (reload_weights, update_weights), those of
trainers' worker extensions, an adapter that replaces itself or is removed, a trainer's word that it has
changed them. Sleep and pause reset the connector's cache themselves. An adapter that is loaded again gets
another id from vLLM, which its blocks' hashes have here beside its name and path.

Seams, unchanged from vLLM 0.30 to 0.33, which run between two steps: EngineCore.collective_rpc, .add_lora,
.remove_lora and .set_weight_version. Replaced: kv_cache_utils._gen_lora_extra_hash_keys. Wrapped, in API
servers: OpenAIServingModels.load_lora_adapter.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from vllm.logger import init_logger

from continuum_lmcache.vllm_plugin.hooks import wrapping

logger = init_logger("vllm.continuum_lmcache")
MOST_CALLS = 20  # that metrics name; of others they are one sum
ONCE = (
    "%s counts as new weights: KV of before is not used again. This line comes once for each call, "
    "continuum_new_weights_total counts them (docs/weight-updates.md)"
)
READS = re.compile(
    "(get|is|are|has|can|list|check|compute|count|report|show|print|describe|save|dump|log|profile|dry)(_|$)"
)
PROBES = re.compile(
    "(^|_)(liveness|livez|alive|keepalive|ready|readyz|readiness|health|healthz|healthcheck|heartbeat|ping|pong"
    "|probe|echo|hello|test|debug|print|noop|nop|no_op|nothing|synchronize|barrier|wait|gc|profile|status|stats"
    "|metrics|info|version)(_|$)"
)
TRAINS = re.compile(
    "weight|param|load|sync(?!hronize)|updat|refit|swap|merg|recv|receiv|broadcast|lora|adapter"
    "|(^|_)(set|init|copy)(_|$)"
)


def may_train(method: str | Callable[..., Any]) -> bool:
    """Whether a call of the workers may change weights, by the words of its name.

    Not if each part of it, between "and", begins with a reader's word, or has a probe's word and none of a
    trainer's. So an unknown name may: to take it for a probe could give wrong tokens, the contrary costs KV.
    """
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|\W+", "_", name_of(method)).lower().strip("_")
    return any(
        not READS.match(part) and (TRAINS.search(part) or not PROBES.search(part))
        for part in re.split("_(?:and|or|then)_", words)
    )


def name_of(method: str | Callable[..., Any]) -> str:
    """A worker's method is called by its name or as a function."""
    return method if isinstance(method, str) else getattr(method, "__name__", type(method).__name__)


def before_rpc(scheduler: Any, method: str | Callable[..., Any], *_: Any, **__: Any) -> None:
    if may_train(method):
        scheduler.on_new_weights(name_of(method))


def before_adapter(scheduler: Any, lora_request: Any) -> None:
    if lora_request.load_inplace:
        scheduler.on_new_weights("load_inplace")
    scheduler.on_adapter(lora_request)


BEFORE: Mapping[str, Callable[..., None]] = {  # what the scheduler is told, by EngineCore's method
    "collective_rpc": before_rpc,
    "add_lora": before_adapter,
    "remove_lora": lambda scheduler, lora_id: scheduler.on_new_weights("remove_lora"),  # noqa: ARG005
    "set_weight_version": lambda scheduler, weight_version: scheduler.on_new_weights("set_weight_version"),  # noqa: ARG005
}


def install() -> None:
    """Once a process, when our scheduler is built."""
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.engine.core import EngineCore

    for name, tell in BEFORE.items():
        _tell_before(EngineCore, name, tell)

    @wrapping.hook(kv_cache_utils)
    def _gen_lora_extra_hash_keys(request: Any) -> list[tuple[Any, ...]]:
        lora = request.lora_request
        return [("lora", lora.lora_name, lora.lora_path, lora.lora_int_id)] if lora else []


def install_in_api_server() -> None:
    """Clear a flag that vLLM up to 0.32 leaves on an adapter that was loaded in place: with each request
    workers would read its files again in each step, with whatever weights they have by then."""
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels

    stock = OpenAIServingModels.load_lora_adapter

    @wrapping.hook(OpenAIServingModels)
    async def load_lora_adapter(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        answer = await stock(self, request, *args, **kwargs)
        if (loaded := self.lora_requests.get(request.lora_name)) is not None:
            loaded.load_inplace = False
        return answer


def note(counts: Counter[str], call: str) -> None:
    """Count a call that costs all KV, and say so once."""
    if call not in counts and len(counts) >= MOST_CALLS:
        call = "other"
    if not counts[call]:
        logger.warning(ONCE, call)
    counts[call] += 1


def _tell_before(engine: Any, name: str, tell: Callable[..., None]) -> None:
    stock = getattr(engine, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        scheduler: Any = getattr(self, "scheduler", None)
        if hasattr(scheduler, "on_new_weights"):  # not while it begins
            tell(scheduler, *args, **kwargs)
        return stock(self, *args, **kwargs)

    call.__name__ = name
    wrapping.hook(engine)(call)
