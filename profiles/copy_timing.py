"""Host to device and back: how long LMCache's chunks of paged KV take to move.

On a CPU machine that is a copy of whole blocks. On CUDA it is a copy
between pinned memory and a staging buffer, and the scatter into scattered blocks beside it, as
LMCache's own connector does; there it is also timed while the GPU computes something else.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from profiles.engine_timing import KvShape
from profiles.timing import Budget, Sample, Timer, in_turns

POOL_BYTES = 256 * 2**20  # on either side; larger than the caches, so that memory is timed
DTYPES = {2: torch.bfloat16, 4: torch.float32}  # of a value of KV, by its bytes
MATMUL_SIZE = 8192  # 20 of them keep a GPU busy for longer than a copy
Directed = tuple[str, int]  # ("load" | "store", chunks)


class Mover(Protocol):
    """Moves chunks, named by their place in the host's pool, to or from random blocks."""

    chunks: int

    def load(self, chunks: list[int]) -> None: ...

    def store(self, chunks: list[int]) -> None: ...


class CpuMover:
    """Copies of whole blocks, as LMCache makes them on a CPU, over pages in vLLM's CPU layout."""

    def __init__(self, shape: KvShape, chunk_tokens: int) -> None:
        values = 2 * shape.heads * shape.head_size * shape.layers
        self.chunks = max(4, POOL_BYTES // (chunk_tokens * shape.bytes_per_token))
        self._per_chunk = chunk_tokens // shape.block_tokens
        self._blocks = self.chunks * self._per_chunk
        page = (self._blocks, shape.heads * shape.block_tokens * 2 * shape.head_size)
        dtype = DTYPES[shape.value_bytes]
        self._pages = [torch.ones(page, dtype=dtype) for _ in range(shape.layers)]
        chunk = (shape.layers, self._per_chunk, chunk_tokens * values // shape.layers // self._per_chunk)
        self._host = [torch.ones(chunk, dtype=dtype) for _ in range(self.chunks)]
        self._draw = torch.Generator().manual_seed(0)

    def load(self, chunks: list[int]) -> None:
        for chunk, blocks in self._where(chunks):
            for page, rows in zip(self._pages, chunk, strict=True):
                page.index_copy_(0, blocks, rows)

    def store(self, chunks: list[int]) -> None:
        for chunk, blocks in self._where(chunks):
            for page, rows in zip(self._pages, chunk, strict=True):
                torch.index_select(page, 0, blocks, out=rows)

    def _where(self, chunks: list[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        some = torch.randperm(self._blocks, generator=self._draw)[: len(chunks) * self._per_chunk]
        return zip([self._host[i] for i in chunks], some.split(self._per_chunk), strict=True)


class CudaMover:
    """Pinned chunks, a staging buffer on the device, and pages with one row per block and layer."""

    def __init__(self, shape: KvShape, chunk_tokens: int) -> None:
        chunk_bytes = chunk_tokens * shape.bytes_per_token
        self.chunks = max(4, 4 * POOL_BYTES // chunk_bytes)
        self._per_chunk = chunk_tokens // shape.block_tokens
        self._blocks = self.chunks * self._per_chunk
        row = chunk_bytes // self._per_chunk // shape.layers
        self._pages = torch.ones(shape.layers, self._blocks, row, dtype=torch.uint8, device="cuda")
        stage = (shape.layers, self._per_chunk, row)
        self._stage = torch.ones(stage, dtype=torch.uint8, device="cuda")
        self._host = torch.ones(self.chunks, *stage, dtype=torch.uint8).pin_memory()
        self._draw = torch.Generator().manual_seed(0)

    def load(self, chunks: list[int]) -> None:
        for chunk, blocks in zip(chunks, self._somewhere(chunks), strict=True):
            self._stage.copy_(self._host[chunk], non_blocking=True)
            self._pages.index_copy_(1, blocks, self._stage)
        torch.cuda.current_stream().synchronize()

    def store(self, chunks: list[int]) -> None:
        for chunk, blocks in zip(chunks, self._somewhere(chunks), strict=True):
            torch.index_select(self._pages, 1, blocks, out=self._stage)
            self._host[chunk].copy_(self._stage, non_blocking=True)
        torch.cuda.current_stream().synchronize()

    def _somewhere(self, chunks: list[int]) -> list[torch.Tensor]:
        some = torch.randperm(self._blocks, generator=self._draw)[: len(chunks) * self._per_chunk]
        return list(some.cuda().split(self._per_chunk))


def time_copies(
    mover: Mover, chunk_counts: list[int], budget: Budget, timer: Timer, tick: Callable[[], None]
) -> dict[Directed, list[Sample]]:
    """Seconds of loads and stores by number of chunks; other chunks each time."""
    draw = random.Random(0)
    points = [(way, n) for n in chunk_counts if n <= mover.chunks for way in ("load", "store")]

    def run(point: Directed) -> Sample:
        chosen = draw.sample(range(mover.chunks), point[1])
        return timer.time(lambda: getattr(mover, point[0])(chosen))

    return in_turns(points, run, budget, tick)


def while_computing(mover: CudaMover, chunks: int, timer: Timer) -> dict[str, Any]:
    """How much a load and matrix products on another stream slow each other down. CUDA only."""
    x = torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()

    def compute() -> None:
        for _ in range(20):
            torch.matmul(x, x)

    def load() -> None:
        with torch.cuda.stream(side):
            mover.load(list(range(chunks)))

    def both() -> None:
        compute()
        load()

    seconds = {}
    for name, work in (("warm-up", both), ("load_s", load), ("compute_s", compute), ("together_s", both)):
        torch.cuda.synchronize()
        seconds[name] = timer.time(lambda work=work: (work(), torch.cuda.synchronize())).wall_s
    hidden = seconds["load_s"] + seconds["compute_s"] - seconds["together_s"]
    share = hidden / min(seconds["load_s"], seconds["compute_s"])
    return {**{k: v for k, v in seconds.items() if k != "warm-up"}, "hidden_share": round(share, 3)}


def mover_for(shape: KvShape, chunk_tokens: int, device: str) -> Mover:
    return CudaMover(shape, chunk_tokens) if device == "cuda" else CpuMover(shape, chunk_tokens)
