"""A small Llama with random weights of a real scale, for machines without a GPU and without a network.

    python -m experiments.tiny_model .work/tiny-model

8 layers x 512, 4 KV heads of 64: 8 KiB of KV per token in bfloat16. Written once, from a seed.
The weights are large enough that the output depends on every token of the context; vLLM's
`--load-format dummy` weights are not, so with them a broken KV copy is not noticed.
"""

from __future__ import annotations

import json
import pydoc_data.topics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import typer
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from experiments.server import cpu_flags, fast_dtype

VOCAB_TOKENS = 4096
KV_BYTES_PER_TOKEN = {"bfloat16": 8192, "float32": 16384}  # layers x KV heads x width x 2 (K and V)
PROFILES = {"bfloat16": "cpu-tiny.yaml", "float32": "cpu-tiny-float32.yaml"}  # in profiles/
AMX_PROFILE = "cpu-tiny-amx.yaml"  # prefill is three times as fast, decoding is not
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_TOKENS,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 32768,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
}
EXPERTS = 4  # all compute each token: which of them is chosen would hang on rounding
GEMMA_3 = CONFIG | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 2,
    "sliding_window": 512,
    "query_pre_attn_scalar": 64,
}
GPT_OSS = CONFIG | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "max_position_embeddings": 131072,  # what its rotary embedding is scaled to
    "intermediate_size": 512,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": EXPERTS,
}
QWEN3_NEXT = CONFIG | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "shared_expert_intermediate_size": 512,
    "num_experts": EXPERTS,
    "num_experts_per_tok": EXPERTS,
}
MODELS = {  # by folder in .work
    "tiny-model": CONFIG,
    "tiny-gemma3": GEMMA_3,
    "tiny-gpt-oss": GPT_OSS,
    "tiny-qwen3-next": QWEN3_NEXT,
}
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def profile_here() -> str:
    """The profile in profiles/ of a CPU of this one's kind."""
    return AMX_PROFILE if "amx_bf16" in cpu_flags() else PROFILES[fast_dtype()]


def weights(seed: int) -> dict[str, torch.Tensor]:
    """Tensors by checkpoint name, drawn so that signals keep their size through the layers."""
    draw = torch.Generator().manual_seed(seed)
    hidden, inner, kv = 512, 1408, 256

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=draw) * gain * columns**-0.5).bfloat16()

    found = {
        "model.embed_tokens.weight": torch.randn(VOCAB_TOKENS, hidden, generator=draw).bfloat16(),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        "lm_head.weight": matrix(VOCAB_TOKENS, hidden, 3.0),
    }
    for layer in range(8):
        at = f"model.layers.{layer}."
        # sharp attention (gain 2 on q and k): the output hangs on single tokens of the context
        found[at + "self_attn.q_proj.weight"] = matrix(hidden, hidden, 2.0)
        found[at + "self_attn.k_proj.weight"] = matrix(kv, hidden, 2.0)
        found[at + "self_attn.v_proj.weight"] = matrix(kv, hidden)
        found[at + "self_attn.o_proj.weight"] = matrix(hidden, hidden)
        found[at + "mlp.gate_proj.weight"] = matrix(inner, hidden)
        found[at + "mlp.up_proj.weight"] = matrix(inner, hidden)
        found[at + "mlp.down_proj.weight"] = matrix(hidden, inner)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[at + norm + ".weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    return found


def save_hybrid(directory: Path, seed: int, config: Mapping[str, Any]) -> None:
    """A model of transformers' own class, drawn alike, under its checkpoints' names."""
    from transformers import AutoConfig, AutoModelForCausalLM

    draw = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    gains = {"q_proj.weight": 2.0, "k_proj.weight": 2.0, "lm_head.weight": 3.0}
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            weight.data.fill_(-6.0)  # states forget a third in 100 tokens
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            weight.data.fill_(1.0)  # over 1
        elif weight.ndim > 1:
            gain = next((gain for end, gain in gains.items() if name.endswith(end)), 1.0)
            scale = gain * weight.shape[-1] ** -0.5
            weight.data = (torch.randn(weight.shape, generator=draw) * scale).bfloat16()
    model.save_pretrained(directory)


def tokenizer() -> Tokenizer:
    """Byte-level BPE, trained on the text of Python's own help topics."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_TOKENS,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    topics = pydoc_data.topics.topics
    bpe.train_from_iterator((topics[name] for name in sorted(topics)), trainer)
    return bpe


def make_model(directory: Path, seed: int = 0, config: Mapping[str, Any] = CONFIG) -> Path:
    """Write the model into `directory`, unless it is there already, and return the directory."""
    done = directory / "done.json"
    want = json.dumps({"seed": seed, "config": config}, sort_keys=True)
    if done.exists() and done.read_text() == want:
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    if config["model_type"] == "llama":
        save_file(weights(seed), directory / "model.safetensors", metadata={"format": "pt"})
    else:
        save_hybrid(directory, seed, config)
    tokenizer().save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": CONFIG["max_position_embeddings"],
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    done.write_text(want)
    return directory


if __name__ == "__main__":
    typer.run(lambda directory: print(make_model(Path(directory))))
