"""Our in-process connector with loads that swap chunks: the control of token checks, on CPUs and GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from connectors.lmcache.connector import ContinuumLMCacheConnector

SETTING = "lmcache.local_disk"  # the control's file lies there: workers may be processes of their own
FLAG = "swap-loads"


class SwappedLoadsConnector(ContinuumLMCacheConnector):
    """While the file FLAG is on LMCache's disk, a load returns each chunk's predecessor in its place.

    All else is unchanged: a check that does not find this error could not find a real one.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._flag = Path(extra[SETTING].removeprefix("file://")) / FLAG
        self._swaps = False
        super().__init__(vllm_config, role, kv_cache_config)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if not self._swaps and self._flag.exists():
            self._swaps = True
            gpu = self._impl.lmcache_engine.gpu_connector
            gpu.batched_to_gpu = with_swapped_chunks(gpu.batched_to_gpu)
        super().start_load_kv(forward_context, **kwargs)


def with_swapped_chunks(load: Any) -> Any:
    """LMCache's batched_to_gpu; each chunk's place gets the chunk that was loaded before it."""
    before: Any = None

    def swapped(memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> Any:
        nonlocal before
        mine = [memory.tensor.clone() for memory in memory_objs]
        wrong = [before if before is not None else mine[-1], *mine[:-1]]
        for memory, other in zip(memory_objs, wrong, strict=True):
            memory.tensor.copy_(other)
        loaded = load(memory_objs, starts, ends, **kwargs)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies are queued, and read the memory that is set right below
        for memory, its_own in zip(memory_objs, mine, strict=True):
            memory.tensor.copy_(its_own)
        before = mine[-1]
        return loaded

    return swapped
