"""Host to device and back: how long LMCache's chunks of paged KV take to move.

On a CPU machine that is a copy of whole blocks. On CUDA it is a copy between pinned memory and a staging
buffer, and the scatter into scattered blocks beside it, as LMCache's own connector does.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from profiles.engine_timing import KvShape
from profiles.timing import timed

POOL_BYTES = {"cpu": 2**28, "cuda": 2**30}  # on either side; larger than the caches, so that memory is timed


class Mover:
    """Moves chunks, named by their place in the host's pool, to or from random blocks."""

    def __init__(self, shape: KvShape, chunk_tokens: int, device: str) -> None:
        chunk_bytes = chunk_tokens * shape.bytes_per_token
        self.chunks = max(4, POOL_BYTES[device] // chunk_bytes)
        self._per_chunk = chunk_tokens // shape.block_tokens
        self._blocks, self._device = self.chunks * self._per_chunk, device
        values = chunk_bytes // self._per_chunk // shape.layers // shape.dtype.itemsize
        rows = (shape.layers, self._per_chunk, values)
        ones = {"dtype": shape.dtype}  # on a CPU a copy of single bytes is five times as slow
        self._pages = torch.ones(shape.layers, self._blocks, rows[2], device=device, **ones)
        self._stage = torch.ones(rows, device=device, **ones) if device == "cuda" else None
        self._host = torch.ones(self.chunks, *rows, pin_memory=device == "cuda", **ones)
        self._draw = torch.Generator().manual_seed(0)

    def move(self, way: str, chunks: list[int]) -> float:
        """Seconds of a "load" or a "store" of these chunks."""
        return timed(self.load if way == "load" else self.store, chunks)[0]

    def load(self, chunks: list[int]) -> None:
        for chunk, blocks in self._somewhere(chunks):
            if self._stage is not None:
                chunk = self._stage.copy_(chunk, non_blocking=True)
            self._pages.index_copy_(1, blocks, chunk)
        self._wait()

    def store(self, chunks: list[int]) -> None:
        for chunk, blocks in self._somewhere(chunks):
            if self._stage is None:
                torch.index_select(self._pages, 1, blocks, out=chunk)
            else:
                chunk.copy_(torch.index_select(self._pages, 1, blocks, out=self._stage), non_blocking=True)
        self._wait()

    def _somewhere(self, chunks: list[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each chunk, and the blocks for it."""
        some = torch.randperm(self._blocks, generator=self._draw)[: len(chunks) * self._per_chunk]
        blocks = some.to(self._device).split(self._per_chunk)
        return zip([self._host[i] for i in chunks], blocks, strict=True)

    def _wait(self) -> None:
        if self._device == "cuda":
            torch.cuda.current_stream().synchronize()
