"""In-process LMCache's chunks have the rows of vLLM's packed KV on a GPU (LMCache issue 4463).

LMCache's CUDA kernel cannot run here: `copied` does what it does, element by element.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("lmcache")

import torch
from lmcache.v1.gpu_connector.gpu_connectors import VLLMPagedMemGPUConnectorV2
from lmcache.v1.metadata import LMCacheMetadata

from connectors.lmcache.copies.check import refuse_wrong_copies
from connectors.lmcache.copies.packed_kv import use_packed_chunks
from continuum_lmcache.errors import ConfigError

LAYERS, BLOCKS, BLOCK, HEADS, HEAD, CHUNK = 2, 6, 4, 2, 8, 8
SLOTS = torch.tensor([17, 18, 19, 16, 4, 5, 6, 7])  # of a chunk's tokens: blocks 4 and 1


class KernelOnCpu(VLLMPagedMemGPUConnectorV2):
    """LMCache's GPU connector as it copies: a chunk on its way from the GPU passes a buffer there."""

    def __init__(self, layout: str) -> None:  # LMCache's needs CUDA
        self.layout_hints = {"kv_layout": layout}
        self.gpu_buffer = torch.zeros(2, LAYERS, CHUNK, HEADS * HEAD)

    def batched_from_gpu(self, chunks, _starts, _ends, slot_mapping, kvcaches):
        copied(self.gpu_buffer, kvcaches, slot_mapping, load=False)
        chunks[0].tensor.copy_(self.gpu_buffer)

    def batched_to_gpu(self, chunks, _starts, _ends, slot_mapping, kvcaches):
        copied(chunks[0].tensor, kvcaches, slot_mapping, load=True)


def copied(chunk: torch.Tensor, caches: list[torch.Tensor], slots: torch.Tensor, load: bool) -> None:
    """load_and_reshape_multi_layer_kernel for NL_X_NB_BS_NH_CS (LMCache 0.5.6, mem_kernels.cu:310, 486)."""
    row = chunk.shape[3]
    for layer, cache in enumerate(caches):
        blocks = cache.permute(0, 2, 1, 3).view(-1)
        for token, slot in enumerate(slots.tolist()):
            at = slot // BLOCK * cache.stride(0) + slot % BLOCK * row
            if load:
                blocks[at : at + row] = chunk[0, layer, token]
            else:
                chunk[0, layer, token] = blocks[at : at + row]


class Pool:
    """LMCache's DRAM pool, for one chunk."""

    def allocate(self, shapes, _dtypes, **_):
        return SimpleNamespace(tensor=torch.zeros(shapes[0]), ref_count_down=lambda: None)


def engine(layout: str = "NHD", **config: object) -> SimpleNamespace:
    """What is read of a worker's LMCacheEngine on a GPU."""
    shape = (LAYERS, 2, CHUNK, HEADS, HEAD)
    metadata = LMCacheMetadata("m", 1, 1, 0, 0, torch.float32, shape, role="worker", chunk_size=CHUNK)
    settings = {"remote_url": None, "remote_serde": "naive", "chunk_size": CHUNK} | config
    return SimpleNamespace(
        gpu_connector=KernelOnCpu(layout),
        metadata=metadata,
        config=SimpleNamespace(**settings),
        storage_manager=Pool(),
        fmt=None,
    )


def kv_caches() -> list[torch.Tensor]:
    """vLLM's on a GPU: [blocks, heads, tokens, K and V], with tokens before heads in memory."""
    shape = (BLOCKS, BLOCK, HEADS, 2 * HEAD)
    return [torch.rand(shape).permute(0, 2, 1, 3) for _ in range(LAYERS)]


def round_trip(shape: torch.Size) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The KV of SLOTS' blocks before a store, and after a load into caches of zeros."""
    caches, chunk = kv_caches(), torch.zeros(shape)
    copied(chunk, caches, SLOTS, load=False)
    loaded = [torch.zeros_like(cache) for cache in caches]
    copied(chunk, loaded, SLOTS, load=True)
    return [cache[[4, 1]] for cache in caches], [cache[[4, 1]] for cache in loaded]


def test_a_chunk_in_lmcaches_own_shape_loses_half_of_each_block():
    (shape,) = engine().metadata.get_shapes()
    before, after = round_trip(shape)
    lost = [(a != b).float().mean().item() for a, b in zip(before, after, strict=True)]
    assert lost == [0.5] * LAYERS


def test_a_chunk_in_our_shape_brings_every_value_back():
    mended = engine()
    use_packed_chunks(mended, kv_caches())
    (shape,) = mended.metadata.get_shapes()
    before, after = round_trip(shape)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_chunk_in_our_shape_has_as_many_bytes():
    mended = engine()
    (before,) = mended.metadata.get_shapes()
    use_packed_chunks(mended, kv_caches())
    (after,) = mended.metadata.get_shapes()
    assert after.numel() == before.numel()


def test_split_kv_keeps_lmcaches_shape():
    split = [torch.zeros(2, BLOCKS, BLOCK, HEADS, HEAD) for _ in range(LAYERS)]
    kept = engine("NHD")
    use_packed_chunks(kept, split)
    assert kept.metadata.kv_shape == (LAYERS, 2, CHUNK, HEADS, HEAD)


def test_heads_before_tokens_are_refused():
    heads_first = [torch.zeros(BLOCKS, HEADS, BLOCK, 2 * HEAD) for _ in range(LAYERS)]
    with pytest.raises(ConfigError, match="VLLM_KV_CACHE_LAYOUT"):
        use_packed_chunks(engine("HND"), heads_first)


def test_a_compression_that_splits_k_from_v_is_refused():
    with pytest.raises(ConfigError, match="remote_serde is 'cachegen'"):
        use_packed_chunks(engine(remote_url="lm://host:1", remote_serde="cachegen"), kv_caches())


def test_the_check_at_the_start_refuses_lmcaches_own_shape_and_accepts_ours():
    caches = {f"layer.{n}": layer for n, layer in enumerate(kv_caches())}
    stock, mended = engine(), engine()
    use_packed_chunks(mended, caches.values())
    refuse_wrong_copies(mended, caches, BLOCK, BLOCKS)
    with pytest.raises(ConfigError, match=f"{LAYERS} of {LAYERS} layers differ"):
        refuse_wrong_copies(stock, caches, BLOCK, BLOCKS)
