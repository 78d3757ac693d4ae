"""`continuum-lmcache doctor` as a user runs it: verdicts, known problems, models, and bad input."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from console import Command
from hypothesis import example, given
from hypothesis import strategies as st

from continuum_lmcache.capacity.kv_budget import GIB
from continuum_lmcache.console.known_models import CONFIGS, by_name
from continuum_lmcache.console.lmcache_check import checked, filled
from continuum_lmcache.console.model_files import shape_of
from continuum_lmcache.errors import ConfigError
from continuum_lmcache.reload.cards import CARDS, card_of
from continuum_lmcache.types import Tier
from experiments.tiny_model import CONFIG

ROOT = Path(__file__).resolve().parent.parent
H200 = ("Llama-3.1-8B", "--profile", ROOT / "profiles" / "h200-llama-3.1-8b.yaml")
BIG = {"lmcache.max_local_cpu_size": 200.0, "lmcache.local_disk": None, "lmcache.max_local_disk_size": 0.0}


def lmcache_json(folder: Path, extra: dict[str, Any], **fields: Any) -> Path:
    path = folder / "lmcache.json"
    config = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    path.write_text(json.dumps(config | fields))
    return path


def config_json(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({k: v for k, v in (CONFIG | changes).items() if v is not None}))
    return path


def names(found: Any) -> set[str]:
    return {finding["name"] for finding in found["findings"]}


# verdicts ---------------------------------------------------------------------


def test_an_h200_by_its_data_sheet_is_advisable_and_shown_as_unmeasured(
    command: Command, tmp_path: Path
) -> None:
    ran = command("doctor", *H200, "--lmcache", lmcache_json(tmp_path, BIG), "--json")
    assert ran.status == 0
    found = ran.json
    assert found["advisable"] and found["costs_from"].endswith("h200-llama-3.1-8b.yaml, not measured")
    assert found["tokens"] == {"gpu": 919_232, "dram": 160 * 2**30 // 131_072}, "up to LMCache's watermark"
    assert found["programs"]["gpu"] == 13  # of 70,126 tokens
    assert found["break_even_tokens"]["dram"] == 0
    assert found["break_even_tokens"]["ssd"] == pytest.approx(15_236, abs=1)
    assert "not-measured" in names(found)


def test_the_screen_shows_what_the_json_has(command: Command) -> None:
    ran = command("doctor", *H200)
    assert ran.status == 0
    assert ran.out.startswith(
        "This deployment is advisable.\n"
        "Llama-3.1-8B on h200: its KV cache holds 919,232 tokens, 13 programs of 70,126.\n"
        "Loading pays from dram always, from ssd from 15,236 tokens ("
    )
    assert len(ran.out.splitlines()) <= 6 and "--explain" in ran.out
    explained = command("doctor", *H200, "--explain").out
    for words in ("not measured", "KV budget, one rank", "57,452 blocks x 16", "NOTE not-measured"):
        assert words in explained, words


def test_a_cache_too_small_for_the_programs_is_not_advisable(command: Command, tmp_path: Path) -> None:
    ran = command("doctor", config_json(tmp_path), "--kv-gib", "0.12", "--context", "20000")
    assert ran.status == 1
    assert "ERROR context-exceeds-kv-cache" in ran.out
    assert ran.out.startswith("This deployment is NOT advisable: 1 error.")


def test_the_verdict_follows_from_the_warnings(command: Command) -> None:
    asked = ("doctor", *H200, "--context", "200000")
    ran = command(*asked)
    assert ran.status == 1
    assert ran.out.startswith("This deployment works but is NOT advisable: 1 warning.")
    assert command(*asked, "--json").json["advisable"] is False


def test_where_memory_is_short_continuum_is_advised_as_the_readme_does(command: Command) -> None:
    asked = ("doctor", "Llama-3.1-8B", "--gpu", "h100", "--programs", "40", "--context", "60000")
    ran = command(*asked)
    assert ran.status == 0
    assert ran.out.startswith("This deployment is advisable: memory is short, so continuum helps.")
    (said,) = [f for f in command(*asked, "--json").json["findings"] if f["name"] == "memory-is-short"]
    again = (40 * 60_000 - 461_360) // 40
    assert (
        f"40 programs need 2,400,000 tokens; the GPU holds 461,360: stock vLLM computes up to {again:,}"
        in (said["evidence"])
    )
    assert "LMCACHE_MAX_LOCAL_CPU_SIZE=367" in said["remedy"]  # 293 GiB at 0.8
    enough = command(*asked, "--lmcache", ROOT / "lmcache.json", "--json")
    assert "memory-is-short" in names(enough.json), "5 GB hold few of them"


def test_dram_that_holds_all_programs_ends_the_shortage(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the size that the finding itself gave."""
    monkeypatch.setenv("LMCACHE_MAX_LOCAL_CPU_SIZE", "367")
    asked = ("doctor", "Llama-3.1-8B", "--gpu", "h100", "--programs", "40", "--context", "60000")
    ran = command(*asked, "--lmcache", ROOT / "lmcache.json", "--json")
    assert "memory-is-short" not in names(ran.json)
    assert ran.json["programs"]["dram"] >= 40


def test_where_not_one_program_fits_nothing_is_advised(command: Command) -> None:
    ran = command("doctor", "Gemma-3-27B", "--gpu", "h100", "--gpu-memory-utilization", "0.72", "--json")
    assert ran.json["programs"]["gpu"] == 0 and ran.status == 1
    assert "context-exceeds-kv-cache" in names(ran.json)


def test_ranks_that_do_not_divide_the_heads_are_an_error(command: Command) -> None:
    ran = command("doctor", "Llama-3.1-8B", "--gpu", "h100", "--tensor-parallel-size", "3")
    assert ran.status == 1 and "ERROR heads-not-divisible: 32 heads, 8 of K and V" in ran.out


def test_the_shipped_file_is_advisable_without_a_profile(command: Command) -> None:
    """README's own command: what nobody measured and nobody asked for is no error and no warning."""
    for name in CONFIGS:
        shape = by_name(name)
        sizes = (n for n in (1, 2, 4, 8, 16, 32, 64) if shape.query_heads % n == 0)
        ranks = next((n for n in sizes if n * 62 * GIB > shape.weight_bytes), 1)
        asked = ("doctor", name, "--gpu", "b200" if ranks == 1 else "h100", "--tensor-parallel-size", ranks)
        ran = command(*asked, "--lmcache", ROOT / "lmcache.json", "--json")
        is_tried = shape.kv_heads > 0 and not shape.windowed_layers and not shape.state_layers
        assert (ran.status == 0 and ran.json["advisable"]) == is_tried, (name, ran.out)
        assert ("untried-over-lmcache" in names(ran.json)) != is_tried
        assert "not-measured" in names(ran.json)


@pytest.mark.parametrize(
    ("model", "connector", "name", "severity"),
    [
        ("gpt-oss-20b", "LMCacheMPConnector", "untried-over-lmcache", "warning"),
        ("gpt-oss-20b", "LMCacheConnectorV1", None, None),  # windows are kept like full attention there
        ("Qwen3-Coder-Next", "LMCacheMPConnector", "untried-over-lmcache", "warning"),
        ("Qwen3-Coder-Next", "LMCacheConnectorV1", "lmcache-refuses-model", "error"),
        ("DeepSeek-V3.2", "ContinuumLMCacheMPConnector", "untried-over-lmcache", "warning"),
        ("DeepSeek-V3.2", "OffloadingConnector", None, None),
        ("Llama-3.1-8B", "LMCacheMPConnector", None, None),
    ],
)
def test_what_nobody_tried_over_lmcache_is_said_as_in_the_models_page(
    command: Command, tmp_path: Path, model: str, connector: str, name: str | None, severity: str | None
) -> None:
    path = lmcache_json(tmp_path, {}, kv_connector=connector)
    ran = command("doctor", model, "--kv-gib", "40", "--lmcache", path, "--json")
    kinds = {"untried-over-lmcache", "lmcache-refuses-model"}
    found = [(f["name"], f["severity"]) for f in ran.json["findings"] if f["name"] in kinds]
    assert found == ([(name, severity)] if name else [])


def test_a_misspelt_variable_is_a_warning_with_the_right_name(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMCACHE_LOCAL_DISC", "/kv")
    path = lmcache_json(tmp_path, {"lmcache.mp.autostart": True}, kv_connector="LMCacheMPConnector")
    ran = command("doctor", "Llama-3.1-8B", "--kv-gib", "40", "--lmcache", path, "--json")
    (said,) = [found for found in ran.json["findings"] if found["name"] == "misspelt-variable"]
    assert said["severity"] == "warning" and "did you mean LMCACHE_LOCAL_DISK?" in said["evidence"]


def test_on_a_cpu_lmcache_refuses_windows(command: Command, tmp_path: Path) -> None:
    profile = next((ROOT / "profiles").glob("*cpu*.yaml"))
    path = lmcache_json(tmp_path, {"lmcache.mp.port": 5555}, kv_connector="LMCacheMPConnector")
    ran = command("doctor", "gpt-oss-20b", "--profile", profile, "--kv-gib", "40", "--lmcache", path)
    assert ran.status == 1 and "refuses layers with a window on a CPU" in ran.out


def test_over_lmcache_in_vllms_process_windows_count_like_full_attention(
    command: Command, tmp_path: Path
) -> None:
    path = lmcache_json(tmp_path, {}, kv_connector="LMCacheConnectorV1")
    asked = ("doctor", "gpt-oss-20b", "--kv-gib", "40", "--json")
    alone, over = (
        command(*asked, *more).json["arithmetic"][0]["value"] for more in ((), ("--lmcache", path))
    )
    assert over == 2 * alone


def test_assumed_costs_follow_the_model_the_card_and_the_ranks(command: Command) -> None:
    def from_disk(model: str, gpu: str, ranks: int = 1) -> float:
        asked = ("doctor", model, "--gpu", gpu, "--tensor-parallel-size", ranks)
        return float(command(*asked, "--json").json["break_even_tokens"]["ssd"] or "inf")

    assert from_disk("Llama-3.1-8B", "l40s") < from_disk("Llama-3.1-8B", "b200")
    assert from_disk("Qwen3-32B", "h200") < from_disk("Llama-3.1-8B", "h200")
    assert from_disk("Llama-3.1-8B", "h200") < from_disk("Llama-3.1-8B", "h200", 2)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA GeForce RTX 5090", "rtx-5090"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_a_card_is_known_by_its_drivers_name(device: str, name: str | None) -> None:
    assert card_of(device) == (CARDS[name] if name else None)


def test_what_does_not_fit_is_said_first_and_alone(command: Command) -> None:
    ran = command("doctor", "Llama-3.1-70B", "--gpu", "H100")
    assert ran.status == 1 and "ERROR no-kv-cache" in ran.out
    assert "KV budget" not in command("doctor", "Llama-3.1-70B", "--gpu", "H100", "--explain").out


# known issues -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "name", "words"),
    [
        ({"lmcache.chunk_size": 100}, "lmcache-setting", "set it to 112"),
        ({"lmcache.max_local_cpu_siz": 3}, "lmcache-setting", "did you mean lmcache.max_local_cpu_size"),
        ({"continuum.max_ttl": 3}, "continuum-setting", "did you mean continuum.max_ttl_s"),
        ({"continuum.policy": "lru"}, "continuum-setting", "continuum.policy is 'lru'"),
        ({"continuum.profile": "none.yaml"}, "no-profile-file", "no file here"),
    ],
)
def test_a_setting_with_which_no_server_starts_is_an_error(
    command: Command, tmp_path: Path, extra: Any, name: str, words: str
) -> None:
    ran = command("doctor", *H200, "--lmcache", lmcache_json(tmp_path, extra), "--json")
    assert ran.status == 1
    (found,) = [f for f in ran.json["findings"] if f["severity"] == "error"]
    assert found["name"] == name and words in found["evidence"]


def test_a_tier_smaller_than_the_gpu_is_a_note(command: Command, tmp_path: Path) -> None:
    small = BIG | {"lmcache.max_local_cpu_size": 100.0}
    for extra, is_named in ((small, True), (BIG, False)):
        ran = command("doctor", *H200, "--lmcache", lmcache_json(tmp_path, extra), "--json")
        assert ran.json["advisable"] and ("tiers-smaller-than-gpu" in names(ran.json)) == is_named


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"kv_role": "kv_consumer"}, "kv-role"),
        ({"kv_connector": "NixlConnector"}, "unknown-connector"),
        (
            {"kv_connector": "LMCacheMPConnector", "kv_connector_extra_config": {"lmcache.mp.hots": 1}},
            "lmcache-setting",
        ),
    ],
)
def test_a_file_with_which_nothing_is_kept_below_the_gpu_is_not_advisable(
    command: Command, tmp_path: Path, fields: dict[str, Any], name: str
) -> None:
    ran = command("doctor", *H200, "--lmcache", lmcache_json(tmp_path, {}, **fields), "--json")
    assert ran.status == 1 and name in names(ran.json)


def test_vllms_own_offloading_is_a_tier_of_its_size(command: Command, tmp_path: Path) -> None:
    for size_gib in (10, 20):
        size = {"cpu_bytes_to_use": size_gib * 2**30}
        path = lmcache_json(tmp_path, size, kv_connector="OffloadingConnector")
        found = command("doctor", *H200, "--lmcache", path, "--json").json
        assert "unknown-connector" not in names(found)
        assert found["tokens"]["dram"] == size_gib * 2**30 // 131_072


@pytest.mark.parametrize(
    ("eviction", "share"),
    [(None, 1.0), ({}, 0.8), ({"trigger_watermark": 0.5}, 0.5), ({"trigger_watermark": "half"}, 0.8)],
)
def test_a_disk_counts_up_to_the_watermark_of_its_adapter(eviction: Any, share: float) -> None:
    assert filled(eviction) == share


def test_no_command_is_refused_in_one_line(command: Command) -> None:
    assert command.refused() == "continuum-lmcache: Missing command."


@pytest.mark.parametrize("connector", ["LMCacheMPConnector", "ContinuumLMCacheMPConnector"])
def test_an_lmcache_servers_tiers_are_shown_as_unknown(
    command: Command, tmp_path: Path, connector: str
) -> None:
    path = lmcache_json(tmp_path, {"lmcache.mp.port": 5555}, kv_connector=connector)
    found = command("doctor", *H200, "--lmcache", path, "--json").json
    assert "tiers-unknown" in names(found)
    assert "unknown-connector" not in names(found)
    assert found["tokens"].keys() == {"gpu"}


def test_the_shipped_files_server_is_said_with_its_sizes(command: Command) -> None:
    found = command("doctor", *H200, "--lmcache", ROOT / "lmcache.json", "--json").json
    (said,) = [one["evidence"] for one in found["findings"] if one["name"] == "lmcache-server"]
    assert "--l1-size-gb 5 " in said and found["tokens"].keys() == {"gpu", "dram", "ssd"}


# models with several kinds of layers --------------------------------------------

HYBRID = {  # the keys by which public configs say so, and how many of 8 layers have full attention
    "Qwen3-Next": ({"full_attention_interval": 4, "linear_conv_kernel_dim": 4}, 2),
    "Nemotron-H": ({"hybrid_override_pattern": "M-M*-M-M"}, 1),
    "Jamba": ({"attn_layer_period": 8, "attn_layer_offset": 4}, 1),
    "MiniMax-Text-01": ({"attn_type_list": [0, 0, 0, 1] * 2}, 2),
    "Zamba2": ({"layers_block_type": ["mamba", "hybrid"] * 4}, 4),
    "Bamba": ({"attn_layer_indices": [1, 5, 7]}, 3),
    "Kimi-Linear": ({"linear_attn_config": {"full_attn_layers": [4, 8]}}, 2),
    "Qwen3.5": ({"layer_types": ["linear_attention", "full_attention"] * 4}, 4),
    "plain": ({"full_attention_interval": 1, "lru_width": None}, 8),
}


@pytest.mark.parametrize("name", HYBRID)
def test_only_layers_with_attention_count_for_each_token(tmp_path: Path, name: str) -> None:
    changes, full = HYBRID[name]
    found = shape_of(str(config_json(tmp_path, **changes)), 1e9)
    assert (found.layers, found.state_layers) == (full, 8 - full)


@pytest.mark.parametrize(
    ("config", "windowed"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"] * 4, "sliding_window": 128}, 4),  # gpt-oss
        ({"sliding_window": 512, "sliding_window_pattern": 6}, 7),  # Gemma 3: one of six is full
        ({"sliding_window": 4096, "use_sliding_window": False}, 0),  # Qwen2
        ({"sliding_window": 4096}, 0),  # Mistral 7B v0.1: all the same, so vLLM keeps all tokens' blocks
        ({}, 0),
    ],
)
def test_layers_with_a_window_count_once_a_program(
    command: Command, tmp_path: Path, config: dict[str, Any], windowed: int
) -> None:
    found = command("doctor", config_json(tmp_path, **config), "--kv-gib", "1", "--json").json
    said = [f["evidence"] for f in found["findings"] if f["name"] == "layers-of-several-kinds"]
    assert [text.split()[0] for text in said] == [str(windowed)] * bool(windowed)
    assert found["arithmetic"][0]["value"] == 1024 * (8 - windowed)


def test_a_model_of_the_local_hugging_face_cache_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models--org--Some-Coder" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    config_json(folder)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert shape_of("org/Some-Coder").name == "Some-Coder"


def test_quantized_weights_are_estimated_by_their_method(tmp_path: Path) -> None:
    plain = shape_of(str(config_json(tmp_path))).weight_bytes
    path = config_json(tmp_path, quantization_config={"quant_method": "fp8"})
    tables = 2 * 4096 * 512 * 2  # embeddings and head, which are left out
    assert shape_of(str(path)).weight_bytes == (plain - tables) / 2 + tables


def test_quantized_weights_that_are_not_here_may_be_given(command: Command, tmp_path: Path) -> None:
    path = config_json(tmp_path, quantization_config={"quant_method": "mxfp4"})
    ran = command("doctor", path, "--gpu", "h100", "--weights-gib", "12.8", "--json")
    assert {step["name"]: step["value"] for step in ran.json["arithmetic"]}["weights"] == 12.8


# bad input ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["Lama-3.1-8B"], "did you mean 'Llama-3.1-8B'?"),
        (["LLAMA-3.1-8X-instruct"], "did you mean 'Llama-3.1-8B'?"),
        (["nothing-like-it"], "Known: DeepSeek"),
        (["Llama-3.1-8B"], "give --gpu or --memory-gib"),
        (["Llama-3.1-8B", "--gpu", "h2000"], "did you mean 'h200'?"),
        ([*H200, "--kv-cache-dtype", "int3"], "known: auto"),
        ([*H200, "--lmcache", "none.json"], "cannot be read: "),
        ([*H200, "--tensor-parallel-size", "0"], "tensor-parallel-size"),
        (["Llama-3.1-8B", "--profile", "none.yaml"], "none.yaml"),
        (["Llama-3.1-8B", "--profil", "x"], "--profil"),
        ([], "model"),
    ],
)
def test_bad_input_ends_in_one_line(command: Command, arguments: list[object], words: str) -> None:
    assert words in command.refused("doctor", *arguments)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"torch_dtype": "int4"}, "torch_dtype is 'int4'"),
        ({"layer_types": ["mamba"] * 8}, "no layer has attention to the whole context"),
    ],
)
def test_a_config_that_says_too_little_or_leaves_no_layer_to_pin_is_refused(
    command: Command, tmp_path: Path, changes: Any, words: str
) -> None:
    assert words in command.refused("doctor", config_json(tmp_path, **changes), "--kv-gib", "1")


anything = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from([10**400, "1e400", "nan", "[1]", '{"a": 1}'])
    | st.text('a1/-.,"[{ ', max_size=5)
    | st.lists(st.integers(), max_size=2)
    | st.dictionaries(st.just("use_odirect"), st.booleans())
)


@given(
    changes=st.dictionaries(
        st.sampled_from(
            [
                *(*CONFIG, "text_config", "layer_types", "kv_lora_rank", "sliding_window", "vision_config"),
                *("quantization_config", "num_experts", "moe_layer_freq", "mlp_only_layers", "q_lora_rank"),
                *("index_head_dim", "sparse_attention_config", "first_k_dense_replace", "mlp_layer_types"),
                *("n_shared_experts", "num_experts_per_tok", "linear_num_value_heads"),
            ]
        ),
        anything,
    )
)
def test_whatever_a_config_holds_a_shape_comes_out_or_a_reason(changes: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = config_json(Path(folder), **changes)
        try:
            assert shape_of(str(path)).bytes_per_token() > 0
        except ConfigError as error:
            assert str(path) in str(error)  # noqa: PT017 (either is right)


SETTINGS = [
    "chunk_size",
    "local_cpu",
    "max_local_cpu_size",
    "local_disk",
    "max_local_disk_size",
    "extra_config",
]


def judged(extra: dict[str, Any]) -> None:
    """Check that the doctor has findings on these settings, and at most one tier of each kind."""
    config = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    sizes_gib, found = checked(config, 1, 16, 131_072, 4096)
    assert sizes_gib.keys() <= {Tier.DRAM, Tier.SSD}
    assert all(finding.evidence and finding.remedy for finding in found)


any_settings = st.dictionaries(st.sampled_from([f"lmcache.{name}" for name in SETTINGS]), anything)


@given(extra=any_settings)
@example({"lmcache.chunk_size": False, "lmcache.local_disk": False, "lmcache.extra_config": "1"})
def test_whatever_an_lmcache_json_holds_it_is_judged(extra: dict[str, Any]) -> None:
    """With LMCache's own reading of it."""
    judged(extra)


@given(extra=any_settings)
@example({"lmcache.chunk_size": None})
@example({"lmcache.local_disk": "/d", "lmcache.extra_config": 1})
def test_whatever_an_lmcache_json_holds_it_is_judged_without_lmcache_too(extra: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "connectors.lmcache_mp.settings", None)
        judged(extra)


# shapes -----------------------------------------------------------------------------


def test_a_config_json_gives_the_shape(tmp_path: Path) -> None:
    found = shape_of(str(config_json(tmp_path)))
    assert (found.bytes_per_token(), found.window_tokens) == (8192, 32_768)
    parameters = 2 * 4096 * 512 + 8 * (2 * 512 * 64 * 12 + 3 * 512 * 1408)
    assert found.weight_bytes == 2 * parameters


def test_the_weights_beside_a_config_are_weighed(tmp_path: Path) -> None:
    config_json(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(b"x" * 1000)
    assert shape_of(str(tmp_path)).weight_bytes == 1000


def test_latent_attention_is_read(tmp_path: Path) -> None:
    found = shape_of(str(config_json(tmp_path, kv_lora_rank=512, qk_rope_head_dim=64)))
    assert found.bytes_per_token(4) == 8 * 576 * 2


def test_the_shape_estimate_of_llama_8b_is_its_published_size(tmp_path: Path) -> None:
    """8.03e9 parameters on the model card; normalisation weights are not in the estimate."""
    shape = {"vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    found = shape_of(str(config_json(tmp_path, **shape, **heads)))
    assert found.weight_bytes / 2 == pytest.approx(8.03e9, rel=0.001)
