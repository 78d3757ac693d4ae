"""Well-known models by name: the fields of their config.json that KV and weights depend on.

Those of this year's were compared with copies of their config.json; give the doctor a path to be sure.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import replace
from typing import Any

from continuum_lmcache.errors import ConfigError
from continuum_lmcache.reload.model_shapes import ModelShape, shape
from continuum_lmcache.reload.model_weights import parameters

CARD = "its config.json and model card on huggingface.co"
SIZES = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "vocab_size", "intermediate_size"),
)
ROUTED = (
    *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts"),
    "first_k_dense_replace",
)
LATENT: dict[str, Any] = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1536}
INDEXED: dict[str, Any] = {"index_head_dim": 128, "index_n_heads": 64}
GLM5: dict[str, Any] = LATENT | INDEXED | {"q_lora_rank": 2048, "index_n_heads": 32}
GLM5 |= {"qk_nope_head_dim": 192, "v_head_dim": 256}
DELTA = {"full_attention_interval": 4, "linear_num_value_heads": 32, "linear_num_key_heads": 16}
DELTA |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}
VISION = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304}
GATED: dict[str, Any] = DELTA | {"attn_output_gate": True}
SEEING: dict[str, Any] = GATED | {"vision_config": VISION}
FP8: dict[str, Any] = {"quantization_config": {"quant_method": "fp8"}}
MXFP4: dict[str, Any] = {"sliding_window": 128, "sliding_window_pattern": 2}
MXFP4["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn"]}
INT4 = {"bits": 4, "group_size": 32, "ignore": ["self_attn", "shared_experts", "re:.*mlp.down"]}
GEMMA3: dict[str, Any] = {"sliding_window": 1024, "sliding_window_pattern": 6, "tie_word_embeddings": True}
SHARED = ["full"] * 21 + ["shared"] * 57  # layers that choose tokens, and that take another's choice
M3 = {"sparse_index_dim": 128, "sparse_attention_freq": [0] * 3 + [1] * 57}
DEEPSEEK, KIMI = "61 7168 128 128 192 163840 129280 18432", "61 7168 64 64 192 {} 163840 18432"


def config(names: str, sizes: str, experts: str = "", **more: Any) -> dict[str, dict[str, Any]]:
    """By name ("/" between those of one shape): SIZES, and ROUTED."""
    found = dict(zip(SIZES, map(int, sizes.split()), strict=True))
    found |= zip(ROUTED, map(int, experts.split()), strict=False)
    return dict.fromkeys(names.split("/"), found | more)


CONFIGS: dict[str, dict[str, Any]] = {
    **config("DeepSeek-V3/DeepSeek-V3.1/DeepSeek-R1", DEEPSEEK, "256 8 2048 1 3", **LATENT, **FP8),
    **config("DeepSeek-V3.2", DEEPSEEK, "256 8 2048 1 3", **LATENT, **INDEXED, **FP8),
    **config("Devstral-Small", "40 5120 32 8 128 131072 131072 32768"),
    **config("Gemma-3-27B", "62 5376 32 16 128 131072 262208 21504", vision_config=VISION, **GEMMA3),
    **config("GLM-4.5-Air", "46 4096 96 8 128 131072 151552 10944", "128 8 1408 1 1"),
    **config("GLM-4.5", "92 5120 96 8 128 131072 151552 12288", "160 8 1536 1 3"),
    **config("GLM-4.6/GLM-4.7", "92 5120 96 8 128 202752 151552 12288", "160 8 1536 1 3"),
    **config("GLM-5/GLM-5.1", "78 6144 64 64 64 202752 154880 12288", "256 8 2048 1 3", **GLM5),
    **config(
        *("GLM-5.2", "78 6144 64 64 64 1048576 154880 12288", "256 8 2048 1 3"),
        **(GLM5 | {"indexer_types": SHARED}),
    ),
    **config("gpt-oss-20b", "24 2880 64 8 64 131072 201088 2880", "32 4 2880", **MXFP4),
    **config("gpt-oss-120b", "36 2880 64 8 64 131072 201088 2880", "128 4 2880", **MXFP4),
    **config("Kimi-K2", KIMI.format(131_072), "384 8 2048 1 1", **LATENT, **FP8),
    **config(
        *("Kimi-K2.5/Kimi-K2.6/Kimi-K2.7-Code", KIMI.format(262_144), "384 8 2048 1 1"),
        **LATENT,
        quantization_config=INT4,
    ),
    **config("Llama-3.1-8B", "32 4096 32 8 128 131072 128256 14336"),
    **config("Llama-3.1-70B/Llama-3.3-70B", "80 8192 64 8 128 131072 128256 28672"),
    **config("MiniMax-M2/MiniMax-M2.5", "62 3072 48 8 128 196608 200064 1536", "256 8 1536", **FP8),
    **config("MiniMax-M2.7", "62 3072 48 8 128 204800 200064 1536", "256 8 1536", **FP8),
    **config(
        *("MiniMax-M3", "60 6144 64 4 128 1048576 200064 12288", "128 4 3072 1 3"),
        sparse_attention_config=M3,
    ),
    **config("Mistral-7B-v0.3", "32 4096 32 8 128 32768 32768 14336"),
    **config("Qwen2.5-7B", "28 3584 28 4 128 32768 152064 18944"),
    **config("Qwen2.5-32B/Qwen2.5-Coder-32B", "64 5120 40 8 128 32768 152064 27648"),
    **config("Qwen3-8B", "36 4096 32 8 128 40960 151936 12288"),
    **config("Qwen3-32B", "64 5120 64 8 128 40960 151936 25600"),
    **config("Qwen3-235B-A22B", "94 4096 64 4 128 40960 151936 12288", "128 8 1536"),
    **config("Qwen3-30B-A3B", "48 2048 32 4 128 40960 151936 6144", "128 8 768"),
    **config("Qwen3-Coder-30B-A3B", "48 2048 32 4 128 262144 151936 6144", "128 8 768"),
    **config("Qwen3-Coder-480B-A35B", "62 6144 96 8 128 262144 151936 8192", "160 8 2560"),
    **config(
        *("Qwen3-Coder-Next/Qwen3-Next-80B-A3B", "48 2048 16 2 256 262144 151936 5120", "512 10 512 1"),
        **GATED,
    ),
    **config(
        *("Qwen3.5-27B/Qwen3.6-27B", "64 5120 24 4 256 262144 248320 17408"),
        **(SEEING | {"linear_num_value_heads": 48}),
    ),
    **config(
        *("Qwen3.5-35B-A3B/Qwen3.6-35B-A3B", "40 2048 16 2 256 262144 248320 512", "256 8 512 1"),
        **SEEING,
    ),
    **config("Seed-OSS-36B", "64 5120 80 8 128 524288 155136 27648"),
}
FORMATS: dict[str, dict[str, Any]] = {  # of a checkpoint, by the end of its name
    "fp8": {"quant_method": "fp8"},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "int4": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "int8": {"quant_method": "gptq", "bits": 8, "group_size": 128},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
}
TUNED = re.compile(r"-(instruct|thinking|chat|it|hf|bf16|\d{4}|block|dynamic)$")
UNCOUNTED = re.compile(r"deepseek-v4|gemma-4|kimi-k3")  # keys of their config.json: model_files.UNCOUNTED
ACTIVE, BILLIONS = re.compile(r"-a\d+b(?=-|$)"), re.compile(r"(?<![a\d.])(\d+(?:\.\d+)?)b(?=-|$)")


def by_name(name: str) -> ModelShape:
    """The shape of a well-known model. Ends that tell a variant are left out, one that tells the weights'
    format counts. Raises ConfigError, which names one of about the same size if one is near."""
    left, quantized = name.lower().removeprefix("meta-"), None
    while (end := left.rpartition("-")[2]) in FORMATS or TUNED.search(left):
        quantized = quantized or FORMATS.get(end)
        left = left.removesuffix(f"-{end}")
    if UNCOUNTED.search(left):
        raise ConfigError(f"{name}: how vLLM keeps the KV of such layers is not counted here")
    names = {one.lower(): one for one in CONFIGS}
    names |= {ACTIVE.sub("", one): found for one, found in names.items()}
    if found := names.get(left):
        return known(found, **({"quantization_config": quantized} if quantized else {}))
    if size := BILLIONS.search(left):
        sizes = {one: sum(parameters(CONFIGS[one], one).values()) / 1e9 for one in CONFIGS}
        names = {key: one for key, one in names.items() if 0.7 < sizes[one] / float(size[1]) < 1.4}
    longer = [key for key in names if key.startswith(f"{left}-")]
    near = longer[:1] or difflib.get_close_matches(left, names, n=1, cutoff=0.75)
    raise ConfigError(f"did you mean {names[near[0]]!r}?" if near else f"Known: {', '.join(CONFIGS)}")


def known(name: str, **more: Any) -> ModelShape:
    """The shape of a name in CONFIGS. `more`: other fields."""
    found = shape(CONFIGS[name] | more, name, name)
    return replace(found, source=f"{found.source}, {CARD}")


KNOWN = {name.lower(): known(name) for name in CONFIGS}
