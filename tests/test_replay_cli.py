"""A whole replay against a server, its files, and what its command line refuses."""

import asyncio
import json
import sys

import pytest
import typer
from openai_server import FakeServer

from experiments.client import ServerUnusable
from experiments.replay import Job, _replay, main
from experiments.selection import Selection


def replayed(tmp_path, server, limit_s=None, **changes):
    async def go():
        async with server.running() as url:
            chosen = Selection(3, count=4, jps=50.0, max_context_tokens=300, time_scale=0.0)
            job = Job(url, "label", chosen, tmp_path / "out", **changes)
            return await _replay(job, chosen.programs(), limit_s)

    return asyncio.run(go())


def test_a_replay_leaves_a_line_per_turn_and_a_summary_with_the_servers_metrics(tmp_path):
    server = FakeServer()
    summary = replayed(tmp_path, server)
    lines = (tmp_path / "out" / "label-seed3.jsonl").read_text().splitlines()
    turns = len(server.bodies)
    assert len(lines) == turns == summary["turns"] and summary["errors"] == 0
    assert json.loads((tmp_path / "out" / "label-seed3.json").read_text()) == summary
    assert summary["pins"] == {"taken": turns}
    gpu, dram = 10 * turns, 3 * turns
    computed = summary["prompt_tokens"] - gpu - dram
    assert summary["tokens_by_source"] == {"gpu": gpu, "dram": dram, "ssd": 0, "computed": computed}
    assert summary["server"]["vllm:kv_cache_usage_perc"] == 0.25
    assert set(summary["server"]) == {
        "vllm:prefix_cache_hits_total",
        "vllm:kv_cache_usage_perc",
        'continuum_pins_total{outcome="taken"}',
        'continuum_prompt_tokens_total{tier="dram"}',
    }


def test_a_replay_with_a_limit_ends_there_and_says_what_it_cut_off(tmp_path):
    summary = replayed(tmp_path, FakeServer(fails_at=2, how="silence"), limit_s=2.0)
    # a slow machine may end fewer programs within the limit; the silent one never ends
    assert summary["cut_s"] and summary["finished"] + len(summary["cut_s"]) == 4
    assert summary["errors"] == 0
    assert all(0 < cut_s <= 2.0 for cut_s in summary["cut_s"])
    assert summary["new_tokens"] <= summary["prompt_tokens"]


def test_a_model_that_is_not_served_is_answered_with_those_that_are(tmp_path):
    with pytest.raises(ServerUnusable, match="does not serve 'big'; it serves fake"):
        replayed(tmp_path, FakeServer(), model="big")


def test_a_program_too_long_for_the_window_is_refused_before_anything_is_sent(tmp_path):
    server = FakeServer(window=250)
    with pytest.raises(ServerUnusable, match="fake has 250; give --max-context"):
        replayed(tmp_path, server)
    assert server.bodies == []


def run_main(monkeypatch, *args):
    monkeypatch.setattr(sys, "argv", ["replay", *args])
    with pytest.raises(SystemExit) as end:
        typer.run(main)
    return end.value.code


def test_an_unreachable_server_is_one_clear_line(monkeypatch):
    said = run_main(monkeypatch, "--base-url", "http://127.0.0.1:9/v1", "--jps", "1")
    assert said.startswith("replay: no OpenAI-compatible server at http://127.0.0.1:9/v1/models: ")
    assert "\n" not in said


@pytest.mark.parametrize("args", [("--policy-label", "a/b"), ("--generator", "gpt")])
def test_an_option_that_makes_no_sense_is_refused(monkeypatch, args):
    assert run_main(monkeypatch, "--base-url", "http://127.0.0.1:9/v1", *args) == 2
