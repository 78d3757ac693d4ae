"""LoRA adapters of the small model, drawn from their name and version."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 8
WIDTHS = {"q_proj": 512, "k_proj": 256, "v_proj": 256}
Version = tuple[str, int]  # a name of one letter, and a number below 10


def save_adapter(folder: Path, model: Path, version: Version) -> Path:
    """An adapter's files, of a strength that changes each token; over those that are there."""
    draw, tensors = torch.Generator().manual_seed(10 * ord(version[0]) + version[1]), {}
    for layer in range(8):
        for name, width in WIDTHS.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}."
            tensors[at + "lora_A.weight"] = torch.randn(RANK, 512, generator=draw) * 512**-0.5
            tensors[at + "lora_B.weight"] = torch.randn(width, RANK, generator=draw) * 0.5
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    about |= {"target_modules": list(WIDTHS), "base_model_name_or_path": str(model)}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return folder
