"""A check at the start: does LMCache bring back the KV that it stored?

LMCache's in-process copies depend on how vLLM lays out its KV. Where the two disagree nothing fails, and
answers are wrong (LMCache issue 4463). So one chunk of random bytes is stored and loaded before the first
request, through LMCache's own GPU connector and DRAM pool, and compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from continuum_lmcache.errors import ConfigError

WRONG = (
    "LMCache does not bring back the KV that it stored ({} of {} layers differ): answers would be wrong. "
    "Use LMCache's own server (docs/mp.md), or serve without --kv-transfer-config"
)
NO_ROOM = "LMCache's DRAM pool has no room for a chunk of {} tokens; set lmcache.max_local_cpu_size higher"

# by layer: its bytes, and the indices of some blocks in them
Blocks = list[tuple[torch.Tensor, torch.Tensor]]


def refuse_wrong_copies(
    engine: Any, kv_caches: Mapping[str, torch.Tensor], block_tokens: int, gpu_blocks: int
) -> None:
    """Store and load a chunk between `engine` (LMCacheEngine) and vLLM's `kv_caches`, which serve nobody yet.

    `kv_caches` have a layer's blocks in their first axis; all are left as they were. Raises ConfigError if
    a layer gets back other bytes than it had.
    """
    count = engine.config.chunk_size // block_tokens
    if engine.storage_manager is None or not 0 < count < gpu_blocks:
        return  # with MLA most ranks store nothing; and block 0 is vLLM's own
    layers = list({layer.data_ptr(): layer for layer in kv_caches.values()}.values())
    device = layers[0].device
    numbers = torch.arange(count, 0, -1, device=device)
    slots = (numbers[:, None] * block_tokens + torch.arange(block_tokens, device=device)).flatten()
    blocks = [(layer.view(torch.uint8), parts(layer, numbers, gpu_blocks)) for layer in layers]
    chunk = allocated(engine, len(slots))
    before = read(blocks)
    written = [torch.randint_like(rows, 256) for rows in before]
    moved = ([chunk], [0], [len(slots)])
    copies = {"slot_mapping": slots, "kvcaches": list(kv_caches.values())}
    try:
        write(blocks, written)
        engine.gpu_connector.batched_from_gpu(*moved, **copies)
        write(blocks, [torch.zeros_like(rows) for rows in written])
        engine.gpu_connector.batched_to_gpu(*moved, **copies)
        loaded = read(blocks)
    finally:
        write(blocks, before)
        chunk.ref_count_down()
    wrong = sum(not torch.equal(was, now) for was, now in zip(written, loaded, strict=True))
    if wrong:
        raise ConfigError(WRONG.format(wrong, len(layers)))


def allocated(engine: Any, tokens: int) -> Any:
    """A chunk in LMCache's pool, as its `store` allocates one."""
    metadata = engine.metadata
    shapes = metadata.get_shapes(tokens)
    chunk = engine.storage_manager.allocate(shapes, metadata.get_dtypes(), fmt=engine.fmt, busy_loop=False)
    if chunk is None:
        raise ConfigError(NO_ROOM.format(tokens))
    return chunk


def read(blocks: Blocks) -> list[torch.Tensor]:
    """A copy of the bytes of these blocks, by layer."""
    return [layer[indices] for layer, indices in blocks]


def write(blocks: Blocks, rows: list[torch.Tensor]) -> None:
    """Write bytes into these blocks, and wait: LMCache copies on streams of its own."""
    for (layer, indices), of_layer in zip(blocks, rows, strict=True):
        layer[indices] = of_layer
    if blocks[0][0].is_cuda:
        torch.cuda.synchronize()


def parts(layer: torch.Tensor, numbers: torch.Tensor, gpu_blocks: int) -> torch.Tensor:
    """The indices of vLLM's blocks in the layer's first axis: an attention kernel's may be a part of one."""
    each = layer.shape[0] // gpu_blocks
    return (numbers[:, None] * each + torch.arange(each, device=numbers.device)).flatten()
