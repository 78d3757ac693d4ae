"""The doctor's programs on ten models, against vLLM's own arithmetic of groups, pages and blocks."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs, get_max_concurrency_for_kv_cache_config
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec

from continuum_lmcache.capacity import kv_budget
from continuum_lmcache.capacity.kv_budget import GIB
from continuum_lmcache.console.known_models import by_name
from continuum_lmcache.reload.cards import CARDS
from continuum_lmcache.reload.cost_model import UNMEASURED
from continuum_lmcache.reload.model_shapes import ModelShape
from continuum_lmcache.vllm_plugin import assembly

CONTEXT = 65_536
BLOCK = 16


def specs(shape: ModelShape, ranks: int, block: int) -> dict[str, Any]:
    """A model's layers as vLLM describes them, one rank's."""
    heads = {"num_kv_heads": max(1, shape.kv_heads // ranks), "head_size": shape.head_size}
    sizes = {"block_size": block, "dtype": torch.bfloat16, **heads}
    kind: Any = FullAttentionSpec if shape.kv_heads else MLAAttentionSpec
    found: dict[str, Any] = {f"full.{n}": kind(**sizes) for n in range(shape.layers)}
    if shape.index_bytes:
        index = {"block_size": block, "num_kv_heads": 1, "dtype": torch.uint8}
        index["head_size"] = shape.index_bytes // shape.layers
        found |= {f"index.{n}": MLAAttentionSpec(**index) for n in range(shape.layers)}
    window = {"sliding_window": shape.attention_window_tokens, **sizes}
    found |= {f"window.{n}": SlidingWindowSpec(**window) for n in range(shape.windowed_layers)}
    page = block * shape.layer_bytes(ranks)
    state = {"shapes": ((shape.state_bytes // ranks // 2,),), "dtypes": (torch.bfloat16,)}
    state |= {"page_size_padded": page, "mamba_cache_mode": "align"}
    for n in range(shape.state_layers):
        found[f"state.{n}"] = MambaSpec(block_size=block, **state)
    return found


MODELS = {  # GiB of KV and ranks; a state's page is a block, whose size vLLM raises for it
    "llama-3.1-8b": (40, 1),
    "llama-3.3-70b": (40, 4),
    "qwen3-32b": (40, 2),
    "qwen3-coder-30b-a3b": (40, 1),
    "qwen3-coder-480b-a35b": (40, 8),
    "glm-4.6": (40, 8),
    "minimax-m2": (40, 4),
    "deepseek-v3.1": (40, 8),
    "deepseek-v3.2": (40, 8),
    "gpt-oss-120b": (40, 1),
    "gemma-3-27b": (40, 1),
    "qwen3-coder-next": (40, 1),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_models_programs_are_those_that_vllm_says_fit(name: str) -> None:
    gib, ranks = MODELS[name]
    shape, block = by_name(name), BLOCK
    if shape.state_layers:
        block = math.ceil(shape.state_bytes / ranks / (shape.layer_bytes(ranks) * BLOCK)) * BLOCK
    config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=BLOCK, max_model_len=CONTEXT, is_encoder_decoder=False
        ),
        cache_config=CacheConfig(block_size=block, enable_prefix_caching=True),
    )
    config.cache_config.kv_cache_layout = "LBNHC"
    config.cache_config.mamba_cache_mode = "align"
    config.model_config = SimpleNamespace(max_model_len=CONTEXT, original_max_model_len=CONTEXT)
    (caches,) = get_kv_cache_configs(config, [specs(shape, ranks, block)], [gib * GIB])
    theirs = get_max_concurrency_for_kv_cache_config(config, caches)
    budget = kv_budget.of_bytes(shape, gib * GIB, block, ranks)
    ours = budget.tokens / (CONTEXT + budget.program_tokens)
    assert ours == pytest.approx(theirs, rel=0.02)


@pytest.mark.parametrize("device", ["NVIDIA L40S", "a card that nobody knows"])
def test_an_engine_without_a_profile_assumes_costs_of_its_model_on_its_card(
    device: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly.current_platform, "get_device_name", lambda *_: device)
    on = VllmConfig(model_config=ModelConfig(model=str(model), dtype="bfloat16", max_model_len=4096))
    costs = assembly.assumed(8192, on)
    assert costs.kv_bytes_per_token == 8192 and not costs.measured
    parameters = 2 * 4096 * 512 + 8 * (2 * 512 * 64 * 12 + 3 * 512 * 1408)
    on_l40s = 2 * parameters / CARDS["l40s"].dense_flop_per_s / CARDS["l40s"].linear_share
    expected = on_l40s if "L40S" in device else UNMEASURED.prefill.per_token_s
    assert costs.prefill.per_token_s == pytest.approx(expected)
