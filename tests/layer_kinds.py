"""The layers of today's models as vLLM groups them, for a bench without tensors."""

from __future__ import annotations

from typing import Any

import torch
from bench import BLOCK
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

HEAD: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
FULL = FullAttentionSpec(**HEAD)
WINDOW_BLOCKS = 4
WINDOW = SlidingWindowSpec(**HEAD, sliding_window=WINDOW_BLOCKS * BLOCK)
STATE = MambaSpec(
    block_size=BLOCK,
    shapes=((FULL.page_size_bytes // 4,),),
    dtypes=(torch.float32,),
    mamba_cache_mode="align",
)
LATENT = MLAAttentionSpec(**HEAD | {"head_size": 576})
FP8 = FullAttentionSpec(**HEAD | {"dtype": torch.uint8}, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)
GEMMA = [FULL, WINDOW, WINDOW, WINDOW]
QWEN3_NEXT = [FULL, STATE, STATE, STATE]


def beside_windows(tokens: int) -> list[Any]:
    """Two groups with windows of so many tokens beside one with full attention."""
    window = SlidingWindowSpec(**HEAD, sliding_window=tokens)
    return [FULL, window, window]
