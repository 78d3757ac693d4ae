"""AgentX's harness: what its trace file says of a program, what its results mean, and one real run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from experiments import agentx
from experiments.peers.install import ROOT
from experiments.trust import linked_turns
from experiments.workload import Program, TurnSpec, growing


def test_a_prompt_repeats_the_blocks_of_the_last_prompt_that_it_keeps() -> None:
    program = growing("p", (200, 100, 50), (10, 20, 5), gap_s=2.0)
    first, second, third = agentx.as_weka(program, "m")["requests"]
    assert [turn["in"] for turn in (first, second, third)] == [200, 310, 380]
    assert [turn["out"] for turn in (first, second, third)] == [10, 20, 5]
    assert [len(turn["hash_ids"]) for turn in (first, second, third)] == [4, 5, 6]  # 64 tokens each
    assert second["hash_ids"][:3] == first["hash_ids"][:3]
    assert second["hash_ids"][3] not in first["hash_ids"]  # a part of it was the answer
    assert third["hash_ids"][:4] == second["hash_ids"][:4]


def test_a_prompt_that_leaves_its_history_shares_no_block_behind_that_place() -> None:
    turns = (TurnSpec(640, 640, 1, gap_s=0.0), TurnSpec(640, 512, 1))
    first, second = agentx.as_weka(Program("p", 0.0, turns), "m")["requests"]
    assert second["hash_ids"][:2] == first["hash_ids"][:2]
    assert not set(second["hash_ids"][2:]) & set(first["hash_ids"])
    assert second["out"] == 4, "one token alone may be a special one, without text"


def test_a_turn_begins_a_gap_after_the_answer_before_it() -> None:
    first, second = agentx.as_weka(growing("p", (200, 100), (10, 20), gap_s=2.0), "m")["requests"]
    assert second["t"] - (first["t"] + first["api_time"]) == pytest.approx(2.0)


def test_sessions_of_a_short_run_do_not_wait_for_longer_than_it_lasts(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    turn = {"input_tokens": 200, "new_tokens": 200, "output_tokens": 9}
    turns = [turn | {"gap_s": 250.0}, turn | {"gap_s": None}]
    trace.write_text(json.dumps({"program_id": "p", "arrival_s": 0, "turns": turns}) + "\n")
    for seconds, gap_s in ((40.0, 5.0), (3600.0, 250.0)):
        (program,), block_tokens = agentx.chosen(trace, 4096, seconds)
        assert program.turns[0].gap_s == gap_s and block_tokens == 64


def test_blocks_shrink_with_their_programs_so_that_turns_keep_theirs(tmp_path: Path) -> None:
    """The harness answers nothing in the place of a turn that adds less than a block."""
    trace = tmp_path / "trace.jsonl"
    turns = [{"input_tokens": 320 * n, "new_tokens": 320, "output_tokens": 90} for n in range(1, 26)]
    told = [turn | {"gap_s": None if number == 24 else 1.0} for number, turn in enumerate(turns)]
    trace.write_text(json.dumps({"program_id": "p", "arrival_s": 0, "turns": told}) + "\n")
    (program,), block_tokens = agentx.chosen(trace, 2048, 40.0)
    assert program.context_tokens <= 2048 - agentx.MARGIN_TOKENS and block_tokens == 12
    blocks = [len(turn["hash_ids"]) for turn in agentx.as_weka(program, "m", block_tokens)["requests"]]
    assert all(later > earlier for earlier, later in zip(blocks, blocks[1:], strict=False))


def test_the_row_has_seconds_and_tokens_of_one_gpu_and_the_tail_of_interactivity() -> None:
    found = {
        "output_token_throughput": {"avg": 300.0},
        "time_to_first_token": {"avg": 900.0, "p50": 500.0, "p90": 2000.0, "max": 9000.0},
        "e2e_output_token_throughput": {"p10": 1.5, "p90": 60.0},
        "request_count": {"avg": 12.0},
        "metadata": {"submission_valid": False, "submission_invalid_reasons": ["unsafe_override"]},
    }
    row = agentx.figures(found, gpus=2)
    assert (row["tokens_per_s"], row["ttft_p90_s"], row["ttft_max_s"]) == (150.0, 2.0, 9.0)
    assert (row["interactivity_p90"], row["errors"], row["counts"]) == (1.5, 0.0, "unsafe_override")
    head, line = agentx.table([{"label": "ours", "sessions": 8, **row}])
    assert dict(zip(head, line, strict=True))["prompt tokens cached, %"] == "-"


def test_a_later_turn_counts_as_linked_if_the_recording_has_it_in_a_program() -> None:
    first = [("s-1", "id-a", 1), ("s-2", "id-x", 2)]
    sent = [*first, ("s-1", "id-c", 9), ("s-1", "id-b", 5), ("s-2", "id-y", 7)]
    lines = [
        json.dumps({"metadata": {"x_correlation_id": s, "x_request_id": r, "request_start_ns": at}})
        for s, r, at in sent
    ]
    sessions = linked_turns.sessions_of(lines)
    assert sessions == {"s-1": ["id-a", "id-b", "id-c"], "s-2": ["id-x", "id-y"]}
    recording = {
        "_recording": [{"format": 2}],
        "p": [{"Request_arrival_time": 1.0, "turn": "chatcmpl-id-b-9"}, {"pinned_time": 2.0}],
        "q": [{"Request_arrival_time": 3.0, "turn": f"chatcmpl-id-{turn}-9"} for turn in "cy"],
    }
    found = linked_turns.counted(sessions, recording)
    assert found == {"sessions": 2, "later turns": 3, "linked": 3, "pieces": 2, "mixed": 1}


def test_a_server_of_ones_own_needs_the_name_of_its_model() -> None:
    command = [sys.executable, "-m", "experiments.agentx", "--url", "http://127.0.0.1:1"]
    said = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert said.returncode != 0 and "--model" in said.stderr


@pytest.mark.network
@pytest.mark.real
def test_the_harness_measures_a_server_of_ours_without_an_error(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries=0", "--timeout=15"]
    probe = [*pip, f"--dest={tmp_path / 'probe'}", "agentx-harness==1.0.12"]
    if subprocess.run(probe, capture_output=True, timeout=120).returncode:
        pytest.skip("pip reaches no package index")
    words = ["--contenders", "continuum", "--sessions", "8", "--seconds", "20", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "experiments.agentx", *words]
    said = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=800)
    assert said.returncode == 0, said.stderr
    (row,) = json.loads((tmp_path / "agentx.json").read_text())["rows"]
    assert row["requests"] > 0 and row["errors"] == 0.0 and row["hit_percent"] > 0
    assert row["counts"] == "unsafe_override"
    assert "| continuum | 8 |" in (tmp_path / "agentx.md").read_text()
    named = [json.loads(line) for line in (tmp_path / "continuum-8/profile_export.jsonl").open()]
    assert {record["metadata"]["phase_kind"] for record in named} == {"warmup", "profiling"}
