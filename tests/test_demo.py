"""The demo's parts that need no server: one config for both policies, and what it writes."""

import json
from pathlib import Path

from rich.console import Console
from test_tables import summary

from experiments.demo import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    GPU_BLOCKS,
    KV_BYTES_PER_TOKEN,
    WINDOW_TOKENS,
    connector,
    ease,
    machine,
    report,
)
from experiments.selection import Selection
from experiments.tiny_model import CONFIG


def test_the_demo_serves_the_repositorys_connector_with_smaller_tiers(tmp_path):
    config = json.loads(connector(tmp_path / "disk", tmp_path / "lmcache.json").read_text())
    shipped = json.loads((Path(__file__).parents[1] / "lmcache.json").read_text())
    extra = config.pop("kv_connector_extra_config")
    before = shipped.pop("kv_connector_extra_config")
    assert config == shipped and before.keys() <= extra.keys()
    assert extra["lmcache.max_local_cpu_size"] < before["lmcache.max_local_cpu_size"]
    assert extra["lmcache.local_disk"] == f"file://{tmp_path}/disk/"


def test_the_scenarios_sizes_are_those_of_the_small_model():
    kv_heads, width, layers = (CONFIG[k] for k in ("num_key_value_heads", "head_dim", "num_hidden_layers"))
    assert 2 * layers * kv_heads * width * 2 == KV_BYTES_PER_TOKEN
    assert CHUNK_TOKENS % BLOCK_TOKENS == 0  # a CPU moves whole blocks


def test_the_gpu_holds_about_seven_programs_and_all_of_them_need_more_than_gpu_and_dram():
    gpu_tokens = GPU_BLOCKS * BLOCK_TOKENS
    for seed in (1, 2, 3):
        programs = Selection(seed, count=20, jps=1.0, max_context_tokens=WINDOW_TOKENS).programs()
        finals = [program.context_tokens for program in programs]
        assert 5 < gpu_tokens / (sum(finals) / len(finals)) < 9
        assert sum(finals) > 2 * gpu_tokens


def test_a_machine_that_is_too_fast_for_the_scenario_is_told_to_ask_for_more() -> None:
    held = summary("fcfs", 1, [3.0]) | {"tokens_by_source": {"gpu": 900, "dram": 80, "computed": 500}}
    pressed = held | {"tokens_by_source": {"gpu": 400, "dram": 300, "ssd": 300, "computed": 500}}
    assert "of the prompt tokens that fcfs reused, 92% were still on the GPU" in ease([held])
    assert ease([pressed]) == "" and ease([held, pressed, pressed]) == ""


def test_a_report_names_the_machine_and_puts_the_baseline_first(tmp_path):
    paths = []
    for label, job_s in (("continuum", 2.0), ("fcfs", 3.0)):
        paths.append(tmp_path / f"{label}-seed1.json")
        paths[-1].write_text(json.dumps(summary(label, 1, [job_s])))
    report(paths, tmp_path, Console(quiet=True))
    said = (tmp_path / "comparison.md").read_text()
    assert machine() in said and "| fcfs | continuum |" in said and "| 1 | 1.5 |" in said
    assert all((tmp_path / f"comparison.{kind}").exists() for kind in ("csv", "png", "svg"))
