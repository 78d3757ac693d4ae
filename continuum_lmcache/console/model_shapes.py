"""A model's shape: from its config.json, or by name for well-known models."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from continuum_lmcache.capacity.kv_budget import ModelShape
from continuum_lmcache.errors import ConfigError, nearest

VALUE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
KV_BYTES = VALUE_BYTES | {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
CARD = "its config.json and model card on huggingface.co"


def dense(name: str, layers: int, kv_heads: int, parameters: float, window_tokens: int) -> ModelShape:
    """A model with heads of 128, in bfloat16."""
    source = f"{parameters / 1e9:.2f}e9 parameters x 2 B, {CARD}"
    return ModelShape(name, layers, kv_heads, 128, 2, parameters * 2, window_tokens, source)


KNOWN = {
    shape.name.lower(): shape
    for shape in (
        dense("Llama-3.1-8B", 32, 8, 8.03e9, 131_072),
        dense("Llama-3.1-70B", 80, 8, 70.55e9, 131_072),
        dense("Qwen2.5-7B", 28, 4, 7.62e9, 32_768),
        dense("Qwen2.5-32B", 64, 8, 32.76e9, 32_768),
        dense("Qwen3-8B", 36, 8, 8.19e9, 40_960),
        dense("Qwen3-32B", 64, 8, 32.76e9, 40_960),
        dense("Qwen3-Coder-30B-A3B", 48, 4, 30.53e9, 262_144),
        dense("Mistral-7B-v0.3", 32, 8, 7.25e9, 32_768),
    )
}


def shape_of(model: str, weight_bytes: float | None = None) -> ModelShape:
    """The shape of a config.json, of a folder with one, or of a model in KNOWN. Raises ConfigError.

    `weight_bytes`: if not the model's own.
    """
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return from_config(path, weight_bytes)
    name = path.name.lower().removesuffix("-instruct")
    if name in KNOWN and not path.is_absolute():
        return KNOWN[name] if weight_bytes is None else given_weights(KNOWN[name], weight_bytes)
    hint = nearest(name, [shape.name for shape in KNOWN.values()])
    raise ConfigError(f"{model} is neither a config.json, nor a folder with one, nor known; {hint}")


def given_weights(shape: ModelShape, weight_bytes: float) -> ModelShape:
    return replace(shape, weight_bytes=weight_bytes, source="as given")


def from_config(path: Path, given_bytes: float | None = None) -> ModelShape:
    """The shape that a Hugging Face config.json describes. Raises ConfigError where it does not."""
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(whole, dict):
        raise ConfigError(f"{path} holds no JSON object; expected a model's config.json")
    inner = whole.get("text_config")
    config = whole | inner if isinstance(inner, dict) else whole
    refuse_hybrid(config, path)
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if not isinstance(dtype, str) or dtype not in VALUE_BYTES:
        raise ConfigError(f"{path}: torch_dtype is {dtype!r}; known: {', '.join(VALUE_BYTES)}")
    kv_heads, head_size = heads(config, path)
    layers = count(config, "num_hidden_layers", path)
    if given_bytes is None:
        weight_bytes, how = weights(config, path, VALUE_BYTES[dtype])
    else:
        weight_bytes, how = given_bytes, "as given"
    return ModelShape(
        path.resolve().parent.name,
        layers,
        kv_heads,
        head_size,
        VALUE_BYTES[dtype],
        weight_bytes,
        count(config, "max_position_embeddings", path),
        how,
        windowed(config, layers),
    )


def heads(config: Mapping[str, Any], path: Path) -> tuple[int, int]:
    """KV heads and the size of one; (0, size of the latent) for MLA."""
    if config.get("kv_lora_rank"):
        return 0, count(config, "kv_lora_rank", path) + count(config, "qk_rope_head_dim", path)
    queries = count(config, "num_attention_heads", path)
    kv_heads = count(config, "num_key_value_heads", path) if config.get("num_key_value_heads") else queries
    if config.get("head_dim"):
        return kv_heads, count(config, "head_dim", path)
    return kv_heads, max(1, count(config, "hidden_size", path) // queries)


def refuse_hybrid(config: Mapping[str, Any], path: Path) -> None:
    """Refuse layers without KV of every token: vLLM divides their memory in another way."""
    for name, value in config.items():
        is_plain = ATTENTION_IN_ALL_LAYERS.get(name)
        is_hybrid = not is_plain(value) if is_plain else name.startswith(STATE_PREFIXES)
        if value and is_hybrid:
            raise ConfigError(
                f"{path}: {name} is {value!r:.60}: some layers keep a state in place of KV, or beside it. "
                "Their budget is not computed here; vLLM prints the size of the KV cache when it starts"
            )


def kinds(value: Any) -> set[str]:
    return {str(kind) for kind in value} if isinstance(value, list) else {str(value)}


STATE_PREFIXES = ("mamba_", "ssm_", "linear_", "lru_", "rwkv")  # "mamba_d_state", "linear_attn_config"
ATTENTION_IN_ALL_LAYERS: Mapping[str, Callable[[Any], bool]] = {  # by a config's key
    "layer_types": lambda v: all("attention" in kind and "linear" not in kind for kind in kinds(v)),
    "layers_block_type": lambda v: kinds(v) == {"attention"},
    "block_types": lambda v: kinds(v) == {"attention"},
    "hybrid_override_pattern": lambda v: kinds(list(str(v))) == {"*"},
    "full_attention_interval": lambda v: v == 1,
    "attn_layer_period": lambda v: v == 1,
    "attn_type_list": lambda v: kinds(v) == {"1"},
    "attn_layer_indices": lambda _: False,
}


def windowed(config: Mapping[str, Any], layers: int) -> int:
    """How many layers attend to a window, or to a chunk, of the context only."""
    listed, every = config.get("layer_types"), config.get("sliding_window_pattern")
    if isinstance(listed, list):
        return sum(str(kind).startswith(("sliding", "chunked")) for kind in listed)
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return 0
    return layers - layers // every if isinstance(every, int) and every > 0 else layers


def weights(config: Mapping[str, Any], path: Path, value_bytes: int) -> tuple[float, str]:
    """Bytes of the weights, and their source: the files beside config.json, else the shape."""
    files = list(path.parent.glob("*.safetensors"))
    if files:
        return float(sum(file.stat().st_size for file in files)), f"{len(files)} safetensors files"
    if "quantization_config" in config:
        raise ConfigError(f"{path}: the weights are quantized and not here; give their size by --weights-gib")
    found = parameters(config, path)
    return float(found * value_bytes), f"{found / 1e9:.2f}e9 parameters by the shape x {value_bytes} B"


def parameters(config: Mapping[str, Any], path: Path) -> int:
    """Parameters of a decoder with gated feed-forward layers: embeddings, attention, experts."""
    hidden, layers = count(config, "hidden_size", path), count(config, "num_hidden_layers", path)
    queries, (kv_heads, size) = count(config, "num_attention_heads", path), heads(config, path)
    tables = count(config, "vocab_size", path) * hidden * (1 if config.get("tie_word_embeddings") else 2)
    attention = 2 * hidden * size * (queries + kv_heads)
    experts = next((count(config, name, path) for name in EXPERTS if config.get(name)), 1)
    width = "moe_intermediate_size" if config.get("moe_intermediate_size") else "intermediate_size"
    inner = count(config, width, path)
    return int(tables + layers * (attention + 3 * hidden * inner * experts))


def count(config: Mapping[str, Any], name: str, path: Path) -> int:
    """A positive whole number of the config. Raises ConfigError."""
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**63:
        raise ConfigError(f"{path}: {name} is {value!r:.80}; it must be a whole number above 0, below 2**63")
    return value
