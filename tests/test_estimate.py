"""`continuum-lmcache estimate`: the answer for a server that only has metrics, and for a trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from console import Command, metrics_server

from continuum_lmcache.console import app
from experiments import estimate as simulation

BEFORE = """vllm:kv_cache_usage_perc 0.5
vllm:num_requests_waiting 0
vllm:request_success_total 10
vllm:num_preemptions_total 1
vllm:prefix_cache_queries_total 1000
vllm:prefix_cache_hits_total 900
"""
AFTER = """vllm:kv_cache_usage_perc 0.99
vllm:num_requests_waiting 7
vllm:request_success_total 60
vllm:num_preemptions_total 4
vllm:prefix_cache_queries_total 3000
vllm:prefix_cache_hits_total 1000
vllm:external_prefix_cache_hits_total 100
"""


def test_a_stock_server_is_judged_by_what_it_did_between_two_looks(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app.time, "sleep", lambda _s: None)
    with metrics_server([BEFORE, AFTER]) as url:
        ran = command("estimate", url + "/v1")
    assert ran.status == 0
    assert ran.out.startswith(
        "yes: 99% of the KV cache is in use, 7 turns waiting, 3 preemptions for 50 turns, and 10% of the "
        "prompt tokens were found in the caches"
    )
    told = ran.err.splitlines()
    assert told[0] == f"{url}: 60 s, in which at least 20 turns must end"
    assert told[1:] == [f"{10 * look} s: 50 turns ended" for look in range(1, 7)]


def test_an_address_needs_no_scheme(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app.time, "sleep", lambda _s: None)
    with metrics_server([BEFORE, AFTER]) as url:
        assert command("estimate", url.removeprefix("http://")).out.startswith("yes: ")
        assert command("status", url.removeprefix("http://") + "/v1/").out.startswith(url)


def test_a_server_that_ends_few_turns_meanwhile_is_judged_since_its_start(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app.time, "sleep", lambda _s: None)
    with metrics_server([AFTER]) as url:
        assert command("estimate", url).out.startswith("yes: since its start, as too few turns ended")
    with metrics_server([BEFORE]) as url:
        assert command("estimate", url).out.startswith("too early to tell: 0 turns ended")


def test_a_server_that_runs_continuum_is_sent_to_status(command: Command) -> None:
    with metrics_server([BEFORE + 'continuum_policy_info{policy="continuum"} 1\n']) as url:
        assert "continuum-lmcache status" in command.refused("estimate", url)


def test_an_estimate_needs_a_server_or_a_trace(command: Command) -> None:
    assert "give the URL" in command.refused("estimate")


@pytest.mark.parametrize("missing", ["vllm", "numpy"])
def test_without_what_the_simulator_needs_a_sentence_says_what_to_install(
    command: Command, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setattr(app, "find_spec", lambda name: None if name == missing else name)
    said = command.refused("estimate", "--trace", "my.jsonl", "--model", "Qwen3-8B")
    assert f"{missing} not installed here; pip install 'continuum-lmcache[gpu]'" in said


def test_a_trace_gets_the_simulators_answer_for_the_model_and_the_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Six agents on a card that holds two of their contexts: they gain; the seventh fits no card."""
    trace = tmp_path / "my.jsonl"
    turns = [{"input_tokens": 9000 + 1000 * i, "new_tokens": 900, "output_tokens": 100} for i in range(6)]
    turns[0]["new_tokens"] = turns[0]["input_tokens"]
    given = [turn | {"gap_s": 1.0} for turn in turns]
    rows = [{"program_id": f"p{i}", "arrival_s": 0.1 * i, "turns": given} for i in range(6)]
    long = {"input_tokens": 40_000, "new_tokens": 40_000, "output_tokens": 9}
    rows += [{"program_id": "long", "arrival_s": 1, "turns": [long]}]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    simulation.main(trace, "Llama-3.1-8B", "a10", 1.0)
    out, err = capsys.readouterr()
    assert out.startswith("yes: agents finish") and "6 programs, a10" in out and "1 programs need" in err
    stock_s, tiered_s, ours_s = (float(row.split("|")[2]) for row in out.splitlines()[-3:])
    assert ours_s < tiered_s <= stock_s
    with pytest.raises(SystemExit, match="a card whose memory holds Llama-3.1-70B"):
        simulation.main(trace, "Llama-3.1-70B", "a10", 0.0)
