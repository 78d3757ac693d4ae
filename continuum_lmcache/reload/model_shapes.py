"""What a model keeps of a context, by the keys of its config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from continuum_lmcache.errors import ConfigError
from continuum_lmcache.reload.model_weights import (
    VALUE_BYTES,
    active_parameters,
    attention_layers,
    count,
    count_or,
    dtype_of,
    gated_delta,
    heads,
    listed,
    weight_bytes,
)

KV_BYTES = VALUE_BYTES | {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
SPARSE_FP8_BYTES = 656  # of a token and layer, of latent attention with an indexer: vLLM's fp8_ds_mla


@dataclass(frozen=True, slots=True)
class ModelShape:
    name: str
    layers: int  # with attention to the whole context, which keep KV of every token
    kv_heads: int  # 0: latent attention (MLA), with the one latent on every rank
    head_size: int  # of one head's K or V; of the latent with its rotary part where kv_heads is 0
    kv_value_bytes: int
    weight_bytes: float
    window_tokens: int  # the longest context
    source: str  # of these numbers
    windowed_layers: int = 0  # further ones, which keep KV of a window
    attention_window_tokens: int = 0
    state_layers: int = 0  # further ones, which keep a state in place of KV
    state_bytes: int = 0  # of one such layer and program; 0: not known
    active_parameters: float = 0.0  # for one token
    attended_values: float = 0.0  # of one earlier token: layers x queries' heads x size of a head
    query_heads: int = 1
    index_bytes: int = 0  # of a token, on every rank: what an indexer of sparse attention keeps beside the KV

    @property
    def special_layers(self) -> str:
        """Which layers keep something else than K and V of every token; "": none."""
        kinds = {"layers with a state": self.state_layers, "layers with a window": self.windowed_layers}
        kinds["latent attention"] = self.kv_heads == 0
        return ", ".join(name for name, has in kinds.items() if has)

    def layer_bytes(self, ranks: int = 1) -> int:
        """KV of one token in one layer on one rank; a head is never split."""
        if self.kv_heads == 0 and self.index_bytes and self.kv_value_bytes == 1:
            return SPARSE_FP8_BYTES
        vectors = 2 * max(1, self.kv_heads // ranks) if self.kv_heads else 1
        return vectors * self.head_size * self.kv_value_bytes

    def bytes_per_token(self, ranks: int = 1) -> int:
        """KV of one more token of a context on one rank."""
        return self._grouped(self.layers) * self.layer_bytes(ranks) + self.index_bytes

    def program_tokens(self, block_tokens: int, ranks: int = 1) -> int:
        """What windows and states of one program take beside its context, in tokens of KV.

        vLLM pads a state to a whole block of the other layers, whose size it raises for that, and with prefix
        caching keeps two states.
        """
        layer, state_bytes = self.layer_bytes(ranks), self.state_bytes / ranks
        window_tokens = (math.ceil(self.attention_window_tokens / block_tokens) + 1) * block_tokens
        window_bytes = self._grouped(self.windowed_layers) * window_tokens * layer
        state_tokens = max(block_tokens, math.ceil(state_bytes / layer / block_tokens) * block_tokens)
        fixed_bytes = window_bytes + self._grouped(self.state_layers) * 2 * state_tokens * layer
        return math.ceil(fixed_bytes / self.bytes_per_token(ranks))

    def _grouped(self, layers: int) -> int:
        """As many layers as vLLM has memory for: each kind is filled up to whole groups of one size."""
        kinds = [number for number in (self.layers, self.windowed_layers, self.state_layers) if number]
        size = max(kinds) if max(kinds) < 1.25 * min(kinds) else min(kinds)
        return -(-layers // size) * size


def shape(
    config: Mapping[str, Any], where: str, name: str = "", weights: tuple[float, str] | None = None
) -> ModelShape:
    """The shape by a config's keys. `where`: for errors; `weights`: their bytes and how these are known, if
    not by the shape. Raises ConfigError."""
    layers = count(config, "num_hidden_layers", where)
    kv_heads, head_size = heads(config, where)
    attending, windowed = attention_layers(config, layers, where), windowed_layers(config, layers)
    full = layers if windowed == layers else max(0, attending - windowed)
    if full == 0:
        raise ConfigError(f"{where}: no layer has attention to the whole context; nothing can be pinned")
    window = config.get("sliding_window") or config.get("attention_chunk_size")
    queries = count(config, "num_attention_heads", where)
    value_size = count_or(config, "v_head_dim", 128, where)  # of latent attention
    size, how = weights or weight_bytes(config, where)
    return ModelShape(
        name,
        full,
        kv_heads,
        head_size,
        VALUE_BYTES[dtype_of(config, where)],
        size,
        count(config, "max_position_embeddings", where),
        how,
        windowed_layers=0 if full == layers else windowed,
        attention_window_tokens=window if isinstance(window, int) and window > 0 else 0,
        state_layers=layers - full - windowed if full < layers else 0,
        state_bytes=state_bytes(config),
        active_parameters=active_parameters(config, where),
        attended_values=full * queries * (head_size if kv_heads else value_size),
        query_heads=queries,
        index_bytes=index_bytes(config, layers),
    )


def windowed_layers(config: Mapping[str, Any], layers: int) -> int:
    """How many layers attend to a window, or to a chunk, of the context only."""
    kinds, every = config.get("layer_types"), config.get("sliding_window_pattern")
    if isinstance(kinds, list):
        return sum(str(kind).startswith(("sliding", "chunked")) for kind in kinds)
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return 0
    return layers - layers // every if isinstance(every, int) and every > 0 else layers


def state_bytes(config: Mapping[str, Any]) -> int:
    """Of one layer and program, of gated delta rule layers (Qwen3-Next): the matrix and the convolution's
    tail, in bf16 as in vLLM 0.32 by default. 0: another kind, which is not counted.
    """
    if not (sizes := gated_delta(config)):
        return 0
    values, keys, key_size, value_size, kernel = sizes
    return 2 * (values * key_size * value_size + (kernel - 1) * (2 * keys * key_size + values * value_size))


def index_bytes(config: Mapping[str, Any], layers: int) -> int:
    """Of a token: keys in FP8 with a scale for 128 (DeepSeek V3.2, GLM 5), or in bf16 (MiniMax M3)."""
    sparse, size = config.get("sparse_attention_config"), config.get("index_head_dim")
    if isinstance(size, int) and size > 0 and config.get("kv_lora_rank"):
        kinds = config.get("indexer_types")
        indexed = kinds.count("full") if isinstance(kinds, list) else layers
        return indexed * (size + size // 128 * 4)
    if not isinstance(sparse, dict) or not isinstance(sparse.get("sparse_index_dim"), int):
        return 0
    every = sparse.get("sparse_attention_freq")
    indexed = listed(every, "1") if isinstance(every, list) else layers
    return 2 * indexed * max(0, int(sparse["sparse_index_dim"]))
