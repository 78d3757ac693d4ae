"""Finds a model: its config.json, here or in the local Hugging Face cache, or a well-known name."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from continuum_lmcache.console.known_models import by_name
from continuum_lmcache.console.machine_specs import read_object
from continuum_lmcache.errors import ConfigError
from continuum_lmcache.reload.model_shapes import ModelShape, shape
from continuum_lmcache.reload.model_weights import count

UNCOUNTED = ("compress_ratios", "global_head_dim")  # DeepSeek V4, Gemma 4: KV of another size in some layers
PARTS = ("text_config", "vision_config")


def shape_of(model: str, weight_bytes: float | None = None) -> ModelShape:
    """The shape of a config.json, of a folder with one, or of a well-known model. Raises ConfigError.

    `weight_bytes`: if not the model's own.
    """
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file() and (cached := sorted(cache_of(model).glob("snapshots/*/config.json"))):
        path = cached[-1]
    if path.is_file():
        return from_config(path, weight_bytes)
    try:
        if path.is_absolute():
            raise ConfigError("no such file")
        found = by_name(path.name)
    except ConfigError as unknown:
        missing = f"{model} is no config.json, no folder with one, not in Hugging Face's cache"
        raise ConfigError(f"{missing}; {unknown}") from None
    return found if weight_bytes is None else replace(found, weight_bytes=weight_bytes, source="as given")


def cache_of(model: str) -> Path:
    """The folder of a model in the local Hugging Face cache."""
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    hub = os.environ.get("HF_HUB_CACHE") or f"{home}/hub"
    return Path(hub).expanduser() / f"models--{model.replace('/', '--')}"


def from_config(path: Path, given_bytes: float | None = None) -> ModelShape:
    """The shape that a Hugging Face config.json describes. Raises ConfigError where it does not."""
    whole = read_object(path, "a model's config.json")
    beside = path.parent / "hf_quant_config.json"  # where NVIDIA's older checkpoints have it
    if beside.is_file() and "quantization_config" not in whole:
        whole["quantization_config"] = read_object(beside, "a quantization").get("quantization")
    for name in ("num_hidden_layers", "hidden_size"):
        count(of_text(whole), name, str(path))  # these no file leaves to a default
    config = of_text(with_defaults(whole))
    if unknown := next((key for key in UNCOUNTED if config.get(key)), None):
        raise ConfigError(f"{path} has {unknown}: how vLLM keeps the KV of such layers is not counted here")
    weights = (given_bytes, "as given") if given_bytes is not None else None
    if weights is None and (files := list(path.parent.glob("*.safetensors"))):
        weights = float(sum(file.stat().st_size for file in files)), f"{len(files)} safetensors files"
    folder = path.parent.parent.parent if path.parent.parent.name == "snapshots" else path.resolve().parent
    return shape(config, str(path), folder.name.removeprefix("models--").rpartition("--")[2], weights)


def of_text(config: dict[str, Any]) -> dict[str, Any]:
    """A config, with its text model's fields in place of the whole's."""
    inner = config.get("text_config")
    return config | inner if isinstance(inner, dict) else config


def with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """A config with its class's defaults for what it leaves out, where transformers is here and knows it."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # else it warns of fields that vLLM corrects
    try:
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig
    except ModuleNotFoundError:
        return config
    fields = {name: value for name, value in config.items() if name != "quantization_config"}
    try:
        found: dict[str, Any] = AutoConfig.for_model(fields.pop("model_type"), **fields).to_dict()
    except (ArithmeticError, AttributeError, LookupError, StrictDataclassError, TypeError, ValueError):
        return config  # what is missing or wrong is told by its name
    for part in PARTS:
        if isinstance(config.get(part), dict) and isinstance(found.get(part), dict):
            config = config | {part: found[part] | config[part]}
    return found | config
