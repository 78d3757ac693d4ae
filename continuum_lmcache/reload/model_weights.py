"""A model's parameters by the keys of its config.json, and the bytes of its weights as they are quantized.

A vision tower counts too; the layers of multi-token prediction do not: vLLM loads them for speculation alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from typing import Any

from continuum_lmcache.errors import ConfigError

VALUE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
Config = Mapping[str, Any]
GIVE = "give --weights-gib"

PARTS = {  # one module of each part, as a checkpoint names it; of the others no format quantizes any
    "attention": "self_attn.o_proj",
    "state": "linear_attn.out_proj",
    "dense": "mlp.down_proj",
    "shared": "mlp.shared_experts.down_proj",
    "experts": "mlp.experts.0.down_proj",
}


def parameters(config: Config, where: str) -> Mapping[str, int]:
    """How many, by part: those of PARTS, "tables" (embeddings and head) and "vision". Raises ConfigError."""
    hidden, layers = count(config, "hidden_size", where), count(config, "num_hidden_layers", where)
    tables = count(config, "vocab_size", where) * hidden * (1 if config.get("tie_word_embeddings") else 2)
    states = layers - attention_layers(config, layers, where)
    routed = next((count(config, name, where) for name in EXPERTS if config.get(name)), 0)
    sparse = min(layers, sparse_layers(config, layers)) if routed else 0
    narrow, wide = (f"{kind}intermediate_size" for kind in ("moe_", "dense_" if sparse else ""))
    inner = count(config, narrow if config.get(narrow) else "intermediate_size", where) if sparse else 0
    outer = wide if config.get(wide) else "intermediate_size"
    shared = inner * count_or(config, "n_shared_experts", 0, where)
    shared = shared or count_or(config, "shared_expert_intermediate_size", 0, where)
    return {
        "tables": tables,
        "attention": (layers - states) * attention_parameters(config, where),
        "state": states * state_parameters(config, where),
        "dense": (layers - sparse) * 3 * hidden * (count(config, outer, where) if sparse < layers else 0),
        "shared": sparse * 3 * hidden * shared,
        "experts": sparse * routed * (3 * inner + 1) * hidden,  # and the router
        "vision": vision_parameters(config.get("vision_config")),
    }


def active_parameters(config: Config, where: str) -> float:
    """Those that one token passes through."""
    parts = parameters(config, where)
    routed = next((config[name] for name in EXPERTS if config.get(name)), 1)
    chosen = next((count(config, name, where) for name in EXPERTS_PER_TOKEN if config.get(name)), routed)
    return sum(parts.values()) - parts["vision"] - parts["experts"] * max(0.0, 1 - chosen / routed)


def attention_parameters(config: Config, where: str) -> int:
    """Of one layer; of latent attention (MLA) with its indexer."""
    hidden, queries = count(config, "hidden_size", where), count(config, "num_attention_heads", where)
    if not config.get("kv_lora_rank"):
        kv_heads, size = heads(config, where)
        is_gated = config.get("attn_output_gate") or config.get("model_type") == "qwen3_next"
        return hidden * size * (queries * (3 if is_gated else 2) + 2 * kv_heads)
    latent, rotary = count(config, "kv_lora_rank", where), count(config, "qk_rope_head_dim", where)
    key, value = (count_or(config, name, 128, where) for name in ("qk_nope_head_dim", "v_head_dim"))
    rank = count_or(config, "q_lora_rank", 0, where)
    query = queries * (key + rotary) * (rank or hidden) + hidden * rank
    index = count_or(config, "index_head_dim", 0, where)
    indexer = index * (hidden + rank * count_or(config, "index_n_heads", 0, where))
    return query + indexer + hidden * (latent + rotary) + queries * (latent * (key + value) + value * hidden)


def state_parameters(config: Config, where: str) -> int:
    """Of one layer with a state: of gated delta rule layers; others count as attention."""
    if not (sizes := gated_delta(config)):
        return attention_parameters(config, where)
    values, keys, key_size, value_size, _ = sizes
    outputs = values * value_size
    return count(config, "hidden_size", where) * (2 * keys * key_size + 3 * outputs + 2 * values)


def gated_delta(config: Config) -> tuple[int, ...]:
    """Heads of values and keys, sizes of a key, a value, the convolution; (): another kind of state."""
    names = "num_value_heads", "num_key_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim"
    given = tuple(config.get(f"linear_{name}") for name in names)
    return given if all(isinstance(n, int) and 0 < n < 2**31 for n in given) else ()  # type: ignore[return-value]


def sparse_layers(config: Config, layers: int) -> int:
    kinds, every = config.get("mlp_layer_types"), config.get("moe_layer_freq")
    if isinstance(kinds, list):
        return kinds.count("sparse")
    if isinstance(every, list):
        return sum(1 for one in every if one)
    steps = (every, config.get("decoder_sparse_step"), config.get("interleave_moe_layer_step"))
    step = max([n for n in steps if isinstance(n, int) and n > 0], default=1)
    first, dense = config.get("first_k_dense_replace"), config.get("mlp_only_layers")
    plain = (first if isinstance(first, int) else 0) + (len(dense) if isinstance(dense, list) else 0)
    return max(0, layers - plain) // step


def vision_parameters(config: Any) -> int:
    """Of the layers of a vision tower, nearly all that it has; 0: there is none, or of another kind."""
    if not isinstance(config, dict):
        return 0
    names = (
        ("depth", "num_hidden_layers", "vt_num_hidden_layers"),
        ("hidden_size", "vt_hidden_size"),
        ("intermediate_size", "vt_intermediate_size"),
    )
    found = [next((config[name] for name in each if isinstance(config.get(name), int)), 0) for each in names]
    layers, hidden, inner = (n if 0 < n < 2**31 else 0 for n in found)
    return layers * hidden * (4 * hidden + (3 if config.get("model_type") == "pixtral" else 2) * inner)


def weight_bytes(config: Config, where: str) -> tuple[float, str]:
    """Bytes of the weights by the shape and the quantization, and how. Raises ConfigError if not known."""
    parts, plain_bits = parameters(config, where), 8.0 * VALUE_BYTES[dtype_of(config, where)]
    if parts["state"] and not gated_delta(config):
        raise ConfigError(f"{where}: how large its layers with a state are is not known here; {GIVE}")
    quantized = config.get("quantization_config")
    bits = quantized_bits(quantized, where) if isinstance(quantized, dict) else plain_bits
    layers, total = config["num_hidden_layers"], 0.0
    dense = layers - min(layers, sparse_layers(config, layers)) if parts["experts"] else layers
    for part, number in parts.items():
        plain = 1.0
        if isinstance(quantized, dict) and part in PARTS and number:
            plain = left_out(quantized, PARTS[part], dense if part == "dense" else layers)
        total += number * (plain_bits * plain + bits * (1 - plain)) / 8
    rest = "" if bits == plain_bits else f", {plain_bits:g} where not quantized"
    return total, f"{sum(parts.values()) / 1e9:.2f}e9 parameters by the shape x {bits:.4g} bits{rest}"


def quantized_bits(config: Config, where: str) -> float:
    """Bits of a quantized weight, with its scales."""
    method, groups = str(config.get("quant_method")), config.get("config_groups")
    algorithm = str(config.get("quant_algo")).upper()
    given: list[Config] = []
    if isinstance(groups, dict):
        each = [group.get("weights") for group in groups.values() if isinstance(group, dict)]
        names = ("num_bits", "group_size", "type", "symmetric")
        given = [{name: one.get(name) for name in names} for one in each if isinstance(one, dict)]
    elif bits := config.get("bits") or config.get("w_bit"):
        given = [{"num_bits": bits, "group_size": config.get("group_size")}]
    elif config.get("load_in_4bit") or config.get("load_in_8bit"):
        return 4.5 if config.get("load_in_4bit") else 8.0
    elif method in ("fp8", "fbgemm_fp8") or algorithm.startswith("FP8"):
        return 8.0
    elif method == "mxfp4" or algorithm == "NVFP4":
        return 4.25 if method == "mxfp4" else 4.5
    if not given or any(one != given[0] for one in given):
        raise ConfigError(f"{where}: what a weight takes under quant_method {method!r} is not known; {GIVE}")
    bits, group = given[0]["num_bits"], given[0]["group_size"]
    if not isinstance(bits, int) or not 0 < bits < 17:
        raise ConfigError(f"{where}: the quantization's bits are {bits!r:.40}; {GIVE}")
    if not isinstance(group, int) or group < 1:
        return float(bits)
    scale_bits = 8 if given[0].get("type") == "float" else 16 if given[0].get("symmetric") else 16 + bits
    return bits + scale_bits / group


def left_out(config: Config, module: str, layers: int) -> float:
    """The share of the layers in which the quantization leaves this module out."""
    names = ("ignore", "modules_to_not_convert", "exclude_modules")
    given: list[Any] = next((config[name] for name in names if isinstance(config.get(name), list)), [])
    at_layers = re.compile(r"^(?!re:).*?(?=layers\.)")
    patterns = [at_layers.sub("*", str(one)) for one in given]
    some = range(min(layers, 1000))
    return sum(is_named(f"model.layers.{n}.{module}", patterns) for n in some) / len(some)


def is_named(name: str, patterns: list[str]) -> bool:
    """Whether one of them has this module or one that it is in: "re:" and an expression, or a glob."""
    for pattern in patterns:
        if pattern.startswith("re:"):
            try:
                if re.match(pattern[3:], name):
                    return True
            except re.error:
                continue
        elif fnmatch(name, pattern) or fnmatch(name, pattern + ".*") or pattern in name.split("."):
            return True
    return False


def attention_layers(config: Config, layers: int, where: str) -> int:
    """Layers with attention, to all or a part of the context; the others keep a state."""
    for name, counted in ATTENTION_LAYERS.items():
        if value := config.get(name):
            try:
                return max(0, min(layers, counted(value, layers)))
            except (TypeError, ValueError, KeyError, ZeroDivisionError):
                raise ConfigError(
                    f"{where}: {name} is {value!r:.60}; no layers can be told from that"
                ) from None
    return layers


def listed(value: Any, *kinds: str) -> int:
    return sum(any(kind in str(one) for kind in kinds) for one in value)


ATTENTION_LAYERS: Mapping[str, Callable[[Any, int], int]] = {  # how many, by the key of a config
    "layer_types": lambda v, layers: layers - listed(v, "linear", "mamba", "conv", "recurrent", "moe", "mlp"),
    "layers_block_type": lambda v, _: listed(v, "attention", "hybrid"),
    "block_types": lambda v, _: listed(v, "attention"),
    "hybrid_override_pattern": lambda v, _: listed(v, "*"),
    "full_attention_interval": lambda v, layers: layers // v,
    "attn_layer_period": lambda v, layers: layers // v,
    "attn_type_list": lambda v, _: listed(v, "1"),
    "attn_layer_indices": lambda v, _: len(v),
    "linear_attn_config": lambda v, _: len(v["full_attn_layers"]),
}


def heads(config: Config, where: str) -> tuple[int, int]:
    """KV heads and the size of one; (0, size of the latent) for MLA."""
    if config.get("kv_lora_rank"):
        return 0, count(config, "kv_lora_rank", where) + count(config, "qk_rope_head_dim", where)
    queries = count(config, "num_attention_heads", where)
    kv_heads = count_or(config, "num_key_value_heads", queries, where)
    if config.get("head_dim"):
        return kv_heads, count(config, "head_dim", where)
    return kv_heads, max(1, count(config, "hidden_size", where) // queries)


def dtype_of(config: Config, where: str) -> str:
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if not isinstance(dtype, str) or dtype not in VALUE_BYTES:
        raise ConfigError(f"{where}: torch_dtype is {dtype!r}; known: {', '.join(VALUE_BYTES)}")
    return dtype


def count_or(config: Config, name: str, default: int, where: str) -> int:
    return count(config, name, where) if config.get(name) else default


def count(config: Config, name: str, where: str) -> int:
    """A positive whole number of the config. Raises ConfigError."""
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**63:
        default = " (its default is known where vLLM is installed)" if value is None else ""
        must = "it must be a whole number above 0, below 2**63"
        raise ConfigError(f"{where}: {name} is {value!r:.80}{default}; {must}")
    return value
