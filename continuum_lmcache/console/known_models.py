"""Well-known models by name: known_models.yaml has their config.json. Give the doctor a path to be sure."""

from __future__ import annotations

import difflib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from continuum_lmcache.errors import ConfigError
from continuum_lmcache.reload.model_shapes import ModelShape, shape
from continuum_lmcache.reload.model_weights import parameters

CARD = "its config.json and model card on huggingface.co"
WRITTEN = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
FORMATS: dict[str, dict[str, Any]] = WRITTEN["formats"]
CONFIGS: dict[str, dict[str, Any]] = {}  # by name
for names, entry in WRITTEN["models"].items():
    found = dict(zip(WRITTEN["sizes"], entry["sizes"], strict=True))
    found |= zip(WRITTEN["experts"], entry.get("experts", ()), strict=False)
    for kind in entry.get("is", ()):
        found |= WRITTEN["kinds"][kind]
    CONFIGS |= dict.fromkeys(names.split("/"), found | entry.get("more", {}))
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
        config = CONFIGS[found] | ({"quantization_config": quantized} if quantized else {})
        known = shape(config, found, found)
        return replace(known, source=f"{known.source}, {CARD}")
    if size := BILLIONS.search(left):
        sizes = {one: sum(parameters(CONFIGS[one], one).values()) / 1e9 for one in CONFIGS}
        names = {key: one for key, one in names.items() if 0.7 < sizes[one] / float(size[1]) < 1.4}
    longer = [key for key in names if key.startswith(f"{left}-")]
    near = longer[:1] or difflib.get_close_matches(left, names, n=1, cutoff=0.75)
    raise ConfigError(f"did you mean {names[near[0]]!r}?" if near else f"Known: {', '.join(CONFIGS)}")
