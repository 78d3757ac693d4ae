"""The doctor's KV and weights for published config.json files, against values by hand.

tests/configs has of each file the fields that count. Copies of the files of DeepSeek-V3.2, gpt-oss-120b,
Kimi-K2, Qwen3-Next, Qwen3.6-35B-A3B (of a quantized release), MiniMax-M2.5, Llama 3.1 70B and
Qwen3-Coder-480B were read in github.com/ai-dynamo/aiconfigurator, with the shape of GLM-4.7; Gemma 3's in
several repositories. The quantization of GLM-4.7-FP8, Qwen3-Coder-480B-FP8 and the GPTQ model, and fields of
Devstral and Qwen2.5 are written after public pages. Parameters are those of the model cards.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from console import Command

from continuum_lmcache.console.known_models import CONFIGS, by_name
from continuum_lmcache.console.model_files import shape_of
from continuum_lmcache.errors import ConfigError
from continuum_lmcache.reload.model_weights import parameters, quantized_bits

CONFIG_FILES = Path(__file__).parent / "configs"
BF16 = 2
HAND = {  # bytes of KV a token on one rank; gigabytes of weights
    # MLA: 512 latent and 64 rotary values a layer; the indexer: 128 values in FP8 and a scale. 671e9 of FP8,
    # of which embeddings and head, 2 x 129,280 x 7168, are bf16
    "deepseek-v3.2": (61 * (576 * BF16 + 132), 671 + 1.85),
    "kimi-k2": (61 * 576 * BF16, 1026.4 + 2.35),
    "glm-4.7-fp8": (92 * 8 * 128 * 2 * BF16, 352.8 + 1.55),
    "qwen3-coder-480b-fp8": (62 * 8 * 128 * 2 * BF16, 480.2 + 1.87),
    "minimax-m2": (62 * 8 * 128 * 2 * BF16, 228.7 + 1.23),
    # 18 of 36 layers with a window. The card: 60.8 GiB; experts of 114.7e9 in MXFP4, 2.1e9 in bf16
    "gpt-oss-120b": (18 * 8 * 64 * 2 * BF16, 60.8 * 1.073742),
    # every sixth of 62 layers is full; the file has neither that nor the vocabulary
    "gemma-3-27b": (10 * 16 * 128 * 2 * BF16, 27.43 * BF16),
    "qwen3-next-80b-a3b": (
        12 * 2 * 256 * 2 * BF16,
        79.7 * BF16,
    ),  # one of four layers; without its MTP's 1.6e9
    "qwen3.6-35b-a3b": (10 * 2 * 256 * 2 * BF16, 35.95 * BF16),  # the card's, MTP's 0.8e9 and vision included
    "llama-3.3-70b": (80 * 8 * 128 * 2 * BF16, 70.55 * BF16),
    "devstral-small-2507": (40 * 8 * 128 * 2 * BF16, 23.57 * BF16),
    # 6.53e9 of 8 bits with 24 bits for each 128, and tables of 1.09e9 in float16
    "qwen2.5-7b-gptq-int8": (28 * 4 * 128 * 2 * BF16, 6.53 * (8 + 24 / 128) / 8 + 1.09 * BF16),
}


@pytest.mark.parametrize("name", HAND)
def test_kv_and_weights_of_a_published_config_are_those_by_hand(name: str) -> None:
    found = shape_of(str(CONFIG_FILES / f"{name}.json"))
    kv_bytes, gigabytes = HAND[name]
    assert found.bytes_per_token() == kv_bytes
    assert found.weight_bytes / 1e9 == pytest.approx(gigabytes, rel=0.03)


@pytest.mark.parametrize("name", sorted(HAND.keys() - {"gemma-3-27b"}))
def test_a_config_that_leaves_nothing_out_gives_the_same_without_transformers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside_vllm = shape_of(str(CONFIG_FILES / f"{name}.json"))
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert shape_of(str(CONFIG_FILES / f"{name}.json")) == beside_vllm


def test_a_text_models_own_file_is_completed_like_the_part_of_another(tmp_path: Path) -> None:
    part = json.loads((CONFIG_FILES / "gemma-3-27b.json").read_text())["text_config"]
    (tmp_path / "config.json").write_text(json.dumps(part))
    assert shape_of(str(tmp_path)).bytes_per_token() == HAND["gemma-3-27b"][0]


def test_one_that_leaves_its_vocabulary_out_is_refused_without_transformers(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    said = command.refused("doctor", CONFIG_FILES / "gemma-3-27b.json", "--gpu", "h100")
    assert "max_position_embeddings is None" in said or "vocab_size is None" in said
    assert "where vLLM is installed" in said


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("openai/gpt-oss-120b", "gpt-oss-120b"),
        ("google/gemma-3-27b-it", "gemma-3-27b"),
        ("zai-org/GLM-4.7-FP8", "glm-4.7-fp8"),
        ("deepseek-ai/DeepSeek-V3.2", "deepseek-v3.2"),
        ("Qwen/Qwen3.6-35B-A3B", "qwen3.6-35b-a3b"),
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8", "qwen3-coder-480b-fp8"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8", "qwen2.5-7b-gptq-int8"),
        ("mistralai/Devstral-Small-2507", "devstral-small-2507"),
    ],
)
def test_by_name_and_by_file_a_model_is_the_same(name: str, file: str) -> None:
    by_file, named = shape_of(str(CONFIG_FILES / f"{file}.json")), shape_of(name)
    assert named.bytes_per_token() == by_file.bytes_per_token()
    assert (named.layers, named.windowed_layers, named.state_layers) == (
        by_file.layers,
        by_file.windowed_layers,
        by_file.state_layers,
    )
    assert named.weight_bytes == pytest.approx(by_file.weight_bytes, rel=0.01)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Qwen3-Coder-480B", "Qwen3-Coder-480B-A35B"),
        ("GLM-4.6-AWQ", "GLM-4.6"),
        ("Qwen3-30B-A3B-Instruct-2507-FP8", "Qwen3-30B-A3B"),
        ("Meta-Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("Kimi-K2-Instruct-0905", "Kimi-K2"),
        ("MiniMax-M3", "MiniMax-M3"),
        ("GLM-5.2-FP8", "GLM-5.2"),
        ("Qwen3.6-27B", "Qwen3.6-27B"),
    ],
)
def test_a_name_is_known_whatever_its_variant(name: str, found: str) -> None:
    assert by_name(name).name == found


NEAR = {"Qwen3-Next": "Qwen3-Next-80B-A3B", "Kimi-K2.7": "Kimi-K2.7-Code"}


@pytest.mark.parametrize("name", [*NEAR, "Qwen3-4B", "GLM-4.9-9B", "Qwen3.6-3B", "gpt-oss-12b"])
def test_a_wrong_name_suggests_a_model_of_about_its_size_or_none(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        by_name(name)
    said = str(refused.value)
    near = next((one for one in CONFIGS if f"did you mean {one!r}" in said), None)
    assert near == NEAR.get(name)
    assert ("Known: " in said) == (near is None)


def test_a_model_whose_kv_is_not_counted_is_refused_by_name_and_by_file(
    command: Command, tmp_path: Path
) -> None:
    assert "is not counted here" in command.refused("doctor", "DeepSeek-V4-Flash", "--gpu", "h200")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"hidden_size": 4096, "num_hidden_layers": 3, "compress_ratios": [0, 4, 8]}))
    assert "has compress_ratios" in command.refused("doctor", path, "--gpu", "h200")


def test_parameters_of_known_models_are_those_of_their_cards() -> None:
    cards = {
        "DeepSeek-V3.1": 671,
        "GLM-4.5-Air": 106.85,
        "gpt-oss-20b": 20.91,
        "Kimi-K2": 1026,
        "Seed-OSS-36B": 36.15,
    }
    cards |= {
        "Llama-3.1-8B": 8.03,
        "MiniMax-M2": 228.7,
        "Qwen3-Coder-30B-A3B": 30.53,
        "Qwen3-235B-A22B": 235.1,
    }
    for name, billions in cards.items():
        assert sum(parameters(CONFIGS[name], name).values()) / 1e9 == pytest.approx(billions, rel=0.002), name
    active = {"DeepSeek-V3.1": 37, "Qwen3-Coder-30B-A3B": 3.3, "Kimi-K2": 32, "GLM-4.5-Air": 13}
    for name, billions in active.items():
        assert by_name(name).active_parameters / 1e9 == pytest.approx(billions, rel=0.04), name


# quantization -------------------------------------------------------------------------


def groups(*weights: Any) -> dict[str, Any]:
    return {"config_groups": {f"group_{n}": {"weights": one} for n, one in enumerate(weights)}}


@pytest.mark.parametrize(
    ("config", "bits"),
    [
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "fbgemm_fp8"}, 8),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}, 4.5),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"quant_method": "mxfp4"}, 4.25),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 8),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
        ({"quant_method": "compressed-tensors", **groups({"num_bits": 8, "type": "float"})}, 8),
        (groups({"num_bits": 4, "type": "int", "group_size": 128, "symmetric": True}), 4 + 16 / 128),
        (groups({"num_bits": 4, "type": "float", "group_size": 16}), 4.5),
    ],
)
def test_a_quantized_weight_has_its_bits_and_its_share_of_a_scale(config: Any, bits: float) -> None:
    assert quantized_bits(config, "here") == pytest.approx(bits)


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "quark"},
        {"quant_method": "torchao", "quant_type": "int4"},
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
        {"quant_method": "compressed-tensors", **groups({"num_bits": 4}, {"num_bits": 8})},
        {"quant_method": "gptq", "bits": "8"},
        groups({"num_bits": [8]}),
        {"quant_method": {"a": 1}, "config_groups": {}},
    ],
)
def test_a_quantization_that_is_not_known_is_refused_and_weights_may_be_given(
    config: dict[str, Any], command: Command, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    whole = json.loads((CONFIG_FILES / "llama-3.3-70b.json").read_text())
    path.write_text(json.dumps(whole | {"quantization_config": config}))
    asked = ("doctor", path, "--gpu", "h200")
    assert "give --weights-gib" in command.refused(*asked)
    assert command(*asked, "--weights-gib", "70", "--json").json["tokens"]["gpu"] > 0


@pytest.mark.parametrize(
    "pattern",
    [
        "re:.*self_attn.*",
        "model.layers.*.self_attn",
        "*.self_attn*",
        "self_attn",
        "language_model.layers.*.self_attn*",
    ],
)
def test_what_a_quantization_leaves_out_counts_whole(pattern: str, tmp_path: Path) -> None:
    whole = json.loads((CONFIG_FILES / "llama-3.3-70b.json").read_text())
    path = tmp_path / "config.json"

    def gigabytes(**more: Any) -> float:
        path.write_text(json.dumps(whole | {"quantization_config": {"quant_method": "fp8", **more}}))
        return shape_of(str(path)).weight_bytes / 1e9

    attention = 80 * 2 * 8192 * 128 * (64 + 8) / 1e9
    assert gigabytes(ignore=[pattern]) == pytest.approx(gigabytes() + attention, rel=0.001)


def test_a_quantization_in_a_file_of_its_own_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((CONFIG_FILES / "llama-3.3-70b.json").read_text())
    whole = shape_of(str(tmp_path)).weight_bytes
    quantized = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(quantized))
    assert shape_of(str(tmp_path)).weight_bytes == pytest.approx(whole / 2, rel=0.03)
