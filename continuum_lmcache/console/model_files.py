"""Finds a model: its config.json, here or in the local Hugging Face cache, or a well-known name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from continuum_lmcache.console.machine_specs import read_object
from continuum_lmcache.errors import ConfigError, nearest
from continuum_lmcache.reload.model_shapes import (
    EXPERTS_PER_TOKEN,
    KNOWN,
    VALUE_BYTES,
    ModelShape,
    dtype_of,
    parameters,
    shape,
)

QUANTIZED_BITS = {"fp8": 8.0, "mxfp4": 4.25, "awq": 4.5, "gptq": 4.5, "modelopt_fp4": 4.5}  # with the scales


def shape_of(model: str, weight_bytes: float | None = None) -> ModelShape:
    """The shape of a config.json, of a folder with one, or of a model in KNOWN. Raises ConfigError.

    `weight_bytes`: if not the model's own.
    """
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file() and (cached := sorted(cache_of(model).glob("snapshots/*/config.json"))):
        path = cached[-1]
    if path.is_file():
        return from_config(path, weight_bytes)
    name = Path(model).name.lower().removesuffix("-instruct")
    if name in KNOWN and not path.is_absolute():
        found = KNOWN[name]
        return found if weight_bytes is None else replace(found, weight_bytes=weight_bytes, source="as given")
    hint = nearest(name, [shape.name for shape in KNOWN.values()])
    raise ConfigError(f"{model} is no config.json, no folder with one, not in Hugging Face's cache; {hint}")


def cache_of(model: str) -> Path:
    """The folder of a model in the local Hugging Face cache."""
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    hub = os.environ.get("HF_HUB_CACHE") or f"{home}/hub"
    return Path(hub).expanduser() / f"models--{model.replace('/', '--')}"


def from_config(path: Path, given_bytes: float | None = None) -> ModelShape:
    """The shape that a Hugging Face config.json describes. Raises ConfigError where it does not."""
    whole = read_object(path, "a model's config.json")
    inner = whole.get("text_config")
    config = whole | inner if isinstance(inner, dict) else whole
    weight_bytes, how = (given_bytes, "as given") if given_bytes is not None else weights(config, path)
    folder = path.parent.parent.parent if path.parent.parent.name == "snapshots" else path.resolve().parent
    name = folder.name.removeprefix("models--").rpartition("--")[2]
    active = parameters(config, str(path), EXPERTS_PER_TOKEN)
    return shape(config, str(path), name, weight_bytes, how, active)


def weights(config: Mapping[str, Any], path: Path) -> tuple[float, str]:
    """Bytes of the weights, and their source: files or their index beside config.json, else the shape."""
    files = list(path.parent.glob("*.safetensors"))
    if files:
        return float(sum(file.stat().st_size for file in files)), f"{len(files)} safetensors files"
    found, size = parameters(config, str(path)), 8.0 * VALUE_BYTES[dtype_of(config, str(path))]
    quantized = config.get("quantization_config")
    if isinstance(quantized, dict):
        method, bits = str(quantized.get("quant_method")), quantized.get("bits")
        size = QUANTIZED_BITS.get(method, float(bits) if isinstance(bits, int) and 0 < bits < 17 else size)
    return found * size / 8, f"{found / 1e9:.2f}e9 parameters by the shape x {size:g} bits"
