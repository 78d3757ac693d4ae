"""The copy path that LMCache 0.5.6 lacks on a machine without a GPU.

vLLM's CPU backend keeps one tensor per layer, `[blocks, heads, block tokens, 2 x head size]`. The layout
within a block is private to its attention kernel, which may pack K. So KV is moved in whole blocks, and a
chunk in LMCache is opaque bytes of the right size:

    vLLM, per layer     [blocks, block values]
    LMCache, per chunk  [layers, chunk tokens / block tokens, block values]

On a GPU nothing here is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lmcache import torch_device_type
from lmcache.utils import EngineType
from lmcache.v1 import gpu_connector
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.memory_management import MemoryObj


class BlockCopier(GPUConnectorInterface):  # type: ignore[misc]
    """Copies whole KV blocks between vLLM's CPU cache and LMCache's chunks.

    LMCache passes `kvcaches` (a tensor per layer), `slot_mapping` (long, one slot per token of the
    prefix) and, for loads, `vllm_cached_tokens`. Token ranges must start and end on a block.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens

    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        blocks = self._blocks(kwargs["slot_mapping"], start, end)
        # running requests may share the blocks that vLLM has already: do not write them
        have = max(0, kwargs.get("vllm_cached_tokens", 0) - start) // self._block_tokens
        for page, rows in self._pairs(memory_obj, blocks, kwargs["kvcaches"]):
            page.index_copy_(0, blocks[have:], rows[have:])

    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        blocks = self._blocks(kwargs["slot_mapping"], start, end)
        for page, rows in self._pairs(memory_obj, blocks, kwargs["kvcaches"]):
            torch.index_select(page, 0, blocks, out=rows)

    def batched_to_gpu(
        self, memory_objs: Any = None, starts: Any = None, ends: Any = None, **kwargs: Any
    ) -> None:
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(memory_obj, start, end, **kwargs)

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(memory_obj, start, end, **kwargs)

    def get_shape(self, num_tokens: int) -> torch.Size:
        raise NotImplementedError("LMCache takes the shape of a vLLM chunk from its metadata")

    def _blocks(self, slots: torch.Tensor, start: int, end: int) -> torch.Tensor:
        if start % self._block_tokens or end % self._block_tokens:
            raise ValueError(f"tokens [{start}, {end}) do not fill blocks of {self._block_tokens} tokens")
        return slots[start : end : self._block_tokens] // self._block_tokens

    def _pairs(
        self, chunk: MemoryObj, blocks: torch.Tensor, layers: Sequence[torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Per layer: vLLM's blocks as rows, and this chunk's rows. Both are views."""
        rows = chunk.tensor.view(len(layers), len(blocks), -1)
        for layer, of_layer in zip(layers, rows, strict=True):
            yield layer.view(layer.shape[0], -1), of_layer


@contextlib.contextmanager
def cpu_copy_path(copier: type[BlockCopier], block_tokens: int) -> Iterator[None]:
    """Within it LMCache builds `copier` in place of its error "No supported cpu connector found".

    LMCache looks its constructor up when it needs one, so one attribute is replaced and restored.
    With any other device this does nothing.
    """
    if torch_device_type != "cpu":
        yield
        return
    stock = gpu_connector.CreateGPUConnector

    def create(config: Any, metadata: Any, engine: Any, **hints: Any) -> GPUConnectorInterface:
        if engine == EngineType.VLLM:
            return copier(block_tokens)
        return stock(config, metadata, engine, **hints)

    gpu_connector.CreateGPUConnector = create
    try:
        yield
    finally:
        gpu_connector.CreateGPUConnector = stock
