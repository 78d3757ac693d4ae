"""The fixed sizes of small servers with in-process LMCache."""

import json
from pathlib import Path

from experiments.selection import Selection
from experiments.small_tiers import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    DTYPE,
    GPU_BLOCKS,
    KV_BYTES_PER_TOKEN,
    WINDOW_TOKENS,
    connector,
)
from experiments.sweep.live import OURS
from experiments.tiny_model import CONFIG


def test_a_server_gets_the_repositorys_settings_with_smaller_tiers_and_our_connector_by_its_path(tmp_path):
    config = json.loads(connector(tmp_path / "disk", tmp_path / "lmcache.json").read_text())
    shipped = json.loads((Path(__file__).parents[1] / "lmcache.json").read_text())
    extra = config.pop("kv_connector_extra_config")
    before = shipped.pop("kv_connector_extra_config")
    assert config == shipped | OURS and before.keys() <= extra.keys()
    assert extra["lmcache.max_local_cpu_size"] < before["lmcache.max_local_cpu_size"]
    assert extra["lmcache.local_disk"] == f"file://{tmp_path}/disk/"


def test_the_sizes_are_those_of_the_small_model():
    kv_heads, width, layers = (CONFIG[k] for k in ("num_key_value_heads", "head_dim", "num_hidden_layers"))
    assert 2 * layers * kv_heads * width * {"bfloat16": 2, "float32": 4}[DTYPE] == KV_BYTES_PER_TOKEN
    assert CHUNK_TOKENS % BLOCK_TOKENS == 0  # a CPU moves whole blocks


def test_the_gpu_holds_about_seven_programs_and_all_of_them_need_more_than_gpu_and_dram():
    gpu_tokens = GPU_BLOCKS * BLOCK_TOKENS
    for seed in (1, 2, 3):
        programs = Selection(seed, count=20, jps=1.0, max_context_tokens=WINDOW_TOKENS).programs()
        finals = [program.context_tokens for program in programs]
        assert 5 < gpu_tokens / (sum(finals) / len(finals)) < 9
        assert sum(finals) > 2 * gpu_tokens
