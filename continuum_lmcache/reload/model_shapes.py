"""A model's shape by the keys of its config.json, and the shapes of well-known models.

Most of the latter were not yet compared with their config.json: give the doctor a path to be sure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from continuum_lmcache.errors import ConfigError

VALUE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
KV_BYTES = VALUE_BYTES | {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
EXPERTS_PER_TOKEN = "num_experts_per_tok"
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
CARD = "its config.json and model card on huggingface.co"
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
SECOND_WINDOWED: dict[str, Any] = {"sliding_window": 128, "sliding_window_pattern": 2}
GATED_DELTA = {"full_attention_interval": 4, "linear_num_value_heads": 32, "linear_num_key_heads": 16}
GATED_DELTA |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The properties of a model that its KV depends on."""

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

    def layer_bytes(self, ranks: int = 1) -> int:
        """KV of one token in one layer on one rank; a head is never split."""
        vectors = 2 * max(1, self.kv_heads // ranks) if self.kv_heads else 1
        return vectors * self.head_size * self.kv_value_bytes

    def bytes_per_token(self, ranks: int = 1) -> int:
        """KV of one more token of a context on one rank."""
        return self._grouped(self.layers) * self.layer_bytes(ranks)

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


def known(sizes: str, billions: float, active: float = 0.0, gib: float = 0.0, **more: Any) -> ModelShape:
    """`sizes`: name, layers, hidden size, heads, KV heads, head size, window. bf16 weights without `gib`."""
    name, *numbers = sizes.split()
    keys = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    config = dict(zip((*keys, "max_position_embeddings"), map(int, numbers), strict=True)) | more
    weights = gib * 2**30 or billions * 2e9
    source = f"{CARD}: {weights / 2**30:.1f} GiB" if gib else f"{billions:.2f}e9 parameters x 2 B, {CARD}"
    return shape(config, name, name, weights, source, (active or billions) * 1e9)


def shape(
    config: Mapping[str, Any], where: str, name: str, weight_bytes: float, how: str, active: float
) -> ModelShape:
    """The shape by a config's keys. `where`: for errors; `active`: parameters for a token."""
    layers = count(config, "num_hidden_layers", where)
    kv_heads, head_size = heads(config, where)
    full, windowed = full_layers(config, layers, where), windowed_layers(config, layers)
    full = layers if windowed == layers else max(0, min(full, layers) - windowed)
    if full == 0:
        raise ConfigError(f"{where}: no layer has attention to the whole context; nothing can be pinned")
    window = config.get("sliding_window") or config.get("attention_chunk_size")
    values = count(config, "num_attention_heads", where) * count_or(config, "head_dim", head_size, where)
    return ModelShape(
        name,
        full,
        kv_heads,
        head_size,
        VALUE_BYTES[dtype_of(config, where)],
        weight_bytes,
        count(config, "max_position_embeddings", where),
        how,
        windowed_layers=0 if full == layers else windowed,
        attention_window_tokens=window if isinstance(window, int) and window > 0 else 0,
        state_layers=layers - full - windowed if full < layers else 0,
        state_bytes=state_bytes(config),
        active_parameters=active,
        attended_values=full * values,
    )


def dtype_of(config: Mapping[str, Any], where: str) -> str:
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if not isinstance(dtype, str) or dtype not in VALUE_BYTES:
        raise ConfigError(f"{where}: torch_dtype is {dtype!r}; known: {', '.join(VALUE_BYTES)}")
    return dtype


def heads(config: Mapping[str, Any], where: str) -> tuple[int, int]:
    """KV heads and the size of one; (0, size of the latent) for MLA."""
    if config.get("kv_lora_rank"):
        return 0, count(config, "kv_lora_rank", where) + count(config, "qk_rope_head_dim", where)
    queries = count(config, "num_attention_heads", where)
    kv_heads = count_or(config, "num_key_value_heads", queries, where)
    if config.get("head_dim"):
        return kv_heads, count(config, "head_dim", where)
    return kv_heads, max(1, count(config, "hidden_size", where) // queries)


def full_layers(config: Mapping[str, Any], layers: int, where: str) -> int:
    """Layers with attention, to all or a part of the context; the others keep a state."""
    for name, counted in ATTENTION_LAYERS.items():
        if value := config.get(name):
            try:
                return counted(value, layers)
            except (TypeError, ValueError, KeyError, ZeroDivisionError):
                raise ConfigError(
                    f"{where}: {name} is {value!r:.60}; no layers can be told from that"
                ) from None
    return layers


def listed(value: Any, *kinds: str) -> int:
    return sum(any(kind in str(one) for kind in kinds) for one in value)


ATTENTION_LAYERS: Mapping[str, Callable[[Any, int], int]] = {  # how many, by the key of a config
    "layer_types": lambda v, _: listed(v, "attention") - listed(v, "linear"),
    "layers_block_type": lambda v, _: listed(v, "attention", "hybrid"),
    "block_types": lambda v, _: listed(v, "attention"),
    "hybrid_override_pattern": lambda v, _: listed(v, "*"),
    "full_attention_interval": lambda v, layers: layers // v,
    "attn_layer_period": lambda v, layers: layers // v,
    "attn_type_list": lambda v, _: listed(v, "1"),
    "attn_layer_indices": lambda v, _: len(v),
    "linear_attn_config": lambda v, _: len(v["full_attn_layers"]),
}


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
    names = "num_value_heads", "num_key_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim"
    given = (config.get(f"linear_{name}") for name in names)
    values, keys, key_size, value_size, kernel = (n if isinstance(n, int) and n > 0 else 0 for n in given)
    if not (values and keys and key_size and value_size and kernel):
        return 0
    return 2 * (values * key_size * value_size + (kernel - 1) * (2 * keys * key_size + values * value_size))


def parameters(config: Mapping[str, Any], where: str, experts_key: str = "") -> int:
    """Parameters of a decoder with gated feed-forward layers: embeddings, attention, experts.

    `experts_key`: of the number of experts to count, in place of all.
    """
    hidden, layers = count(config, "hidden_size", where), count(config, "num_hidden_layers", where)
    queries, (kv_heads, size) = count(config, "num_attention_heads", where), heads(config, where)
    tables = count(config, "vocab_size", where) * hidden * (1 if config.get("tie_word_embeddings") else 2)
    attention = 2 * hidden * size * (queries + kv_heads)
    experts = next((count(config, name, where) for name in EXPERTS if config.get(name)), 1)
    if experts > 1:
        experts = count_or(config, experts_key, experts, where)
    width = "moe_intermediate_size" if config.get("moe_intermediate_size") else "intermediate_size"
    inner = count(config, width, where)
    return int(tables + layers * (attention + 3 * hidden * inner * experts))


def count_or(config: Mapping[str, Any], name: str, default: int, where: str) -> int:
    return count(config, name, where) if config.get(name) else default


def count(config: Mapping[str, Any], name: str, where: str) -> int:
    """A positive whole number of the config. Raises ConfigError."""
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**63:
        raise ConfigError(f"{where}: {name} is {value!r:.80}; it must be a whole number above 0, below 2**63")
    return value


KNOWN = {
    shape.name.lower(): shape
    for shape in (
        known("DeepSeek-V3.1 61 7168 128 128 128 163840", 671, 37, 641, **LATENT),
        known("Devstral-Small 40 5120 32 8 128 131072", 23.57),
        known("Gemma-3-27B 62 5376 32 16 128 131072", 27.43, sliding_window=1024, sliding_window_pattern=6),
        known("GLM-4.5-Air 46 4096 96 8 128 131072", 106.85, 12),
        known("GLM-4.6 92 5120 96 8 128 202752", 356.79, 32),
        known("gpt-oss-20b 24 2880 64 8 64 131072", 20.91, 3.6, 12.8, **SECOND_WINDOWED),
        known("gpt-oss-120b 36 2880 64 8 64 131072", 116.83, 5.1, 60.8, **SECOND_WINDOWED),
        known("Kimi-K2 61 7168 64 64 128 262144", 1026, 32, 959, **LATENT),
        known("Llama-3.1-8B 32 4096 32 8 128 131072", 8.03),
        known("Llama-3.1-70B 80 8192 64 8 128 131072", 70.55),
        known("Llama-3.3-70B 80 8192 64 8 128 131072", 70.55),
        known("MiniMax-M2 62 3072 48 8 128 196608", 228.7, 10, 214),
        known("Mistral-7B-v0.3 32 4096 32 8 128 32768", 7.25),
        known("Qwen2.5-7B 28 3584 28 4 128 32768", 7.62),
        known("Qwen2.5-32B 64 5120 40 8 128 32768", 32.76),
        known("Qwen2.5-Coder-32B 64 5120 40 8 128 32768", 32.76),
        known("Qwen3-8B 36 4096 32 8 128 40960", 8.19),
        known("Qwen3-32B 64 5120 64 8 128 40960", 32.76),
        known("Qwen3-Coder-30B-A3B 48 2048 32 4 128 262144", 30.53, 3.3),
        known("Qwen3-Coder-480B-A35B 62 6144 96 8 128 262144", 480.15, 35),
        known("Qwen3-Coder-Next 48 2048 16 2 256 262144", 79.67, 3.9, **GATED_DELTA),
        known("Seed-OSS-36B 64 5120 80 8 128 524288", 36.15),
    )
}
