"""Chunks of the right shape for vLLM's packed KV on GPUs.

Since 0.26 vLLM keeps a head's K and V side by side: a block is [tokens, heads, 2 * head size]. LMCache's CUDA
kernel copies rows of such a block whose length is the last axis of LMCache's chunk. In-process, up to
0.5.6, that axis is [2, layers, tokens, heads * head size]'s: half a row. Half of every block is
stored, half is loaded, at wrong places, without an error (LMCache issue 4463). A chunk of [1, layers, tokens,
heads * 2 * head size] has as many bytes and the right rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from lmcache.lmcache_native import EngineKVFormat
from lmcache.utils import EngineType
from lmcache.v1.gpu_connector.gpu_connectors import VLLMPagedMemGPUConnectorV2
from lmcache.v1.gpu_connector.utils import normalize_kv_and_discover_format

from continuum_lmcache.errors import ConfigError

PACKED = EngineKVFormat.NL_X_NB_BS_NH_CS  # tokens before heads: what LMCache asks vLLM for
PACKED_BY_HEAD = EngineKVFormat.NL_X_NB_NH_BS_CS

LAYOUT = (
    "VLLM_KV_CACHE_LAYOUT selects a layout with heads before tokens, in which LMCache 0.5.6 loads wrong KV "
    "(LMCache issue 4463): remove it"
)
SERDE = (
    "lmcache.remote_serde is {!r}, which splits K from V, and vLLM keeps them side by side: set it to 'naive'"
)


def use_packed_chunks(engine: Any, kv_caches: Iterable[torch.Tensor]) -> None:
    """Give `engine` (LMCacheEngine) chunks of packed rows, if vLLM's `kv_caches` on a GPU are packed.

    Call it before anything is stored. Raises ConfigError for what LMCache cannot copy.
    """
    gpu = engine.gpu_connector
    if not isinstance(gpu, VLLMPagedMemGPUConnectorV2):
        return
    kv_format, _ = normalize_kv_and_discover_format(
        list(kv_caches), EngineType.VLLM, layout_hints=gpu.layout_hints
    )
    if kv_format == PACKED_BY_HEAD:
        raise ConfigError(LAYOUT)
    if kv_format != PACKED:
        return
    config = engine.config
    if config.remote_url and config.remote_serde not in (None, "naive"):
        raise ConfigError(SERDE.format(config.remote_serde))
    engine.metadata.kv_shape = packed(engine.metadata.kv_shape)
    if gpu.gpu_buffer is not None:  # a chunk passes it on its way from the GPU
        _, layers, tokens, _ = gpu.gpu_buffer.shape
        gpu.gpu_buffer = gpu.gpu_buffer.view(1, layers, tokens, -1)


def packed(kv_shape: tuple[int, int, int, int, int]) -> tuple[int, int, int, int, int]:
    """LMCache's (layers, K and V, tokens, heads, head size), with K and V side by side."""
    layers, planes, tokens, heads, head_size = kv_shape
    return layers, 1, tokens, heads, planes * head_size
