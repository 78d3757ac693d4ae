"""What `continuum-lmcache top` is told, on vLLM's own scheduler in virtual time, and shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench import BLOCK, Bench, prompt
from console import Command, metrics_server
from rich.console import Console

from continuum_lmcache.console.top import view
from continuum_lmcache.vllm_plugin.live.programs import MOST_ROWS, SAME_ANSWER_S
from continuum_lmcache.vllm_plugin.scheduler import ContinuumScheduler


@pytest.fixture
def bench(model: Path, settings: Any) -> Bench:
    """Ten blocks: one program of six has room, a second one has not. Tools of five seconds."""
    settings(policy="static-ttl", static_ttl_s=5.0)
    return Bench(ContinuumScheduler, model, blocks=11)


def said(bench: Bench) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bench.scheduler.live.text())
    return found


def states(bench: Bench) -> list[str]:
    return [row["state"] for row in said(bench)["programs"]]


def shown(bench: Bench) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(view("http://h", [said(bench)]))
    return capture.get()


def test_each_program_is_told_with_what_it_does_and_its_place_in_the_line(make: Any) -> None:
    bench = make(policy="continuum", blocks=20)
    for i in range(8):
        bench.send(f"p{i}", prompt(100, i), out=4)
    bench.step()
    rows = said(bench)["programs"]
    held = sum(turn.in_line for turn in bench.engine.turns.values())
    assert 0 < held < 8
    assert [row["state"] for row in rows] == ["running"] * (8 - held) + ["in line"] * held
    assert [row.get("place") for row in rows] == [None] * (8 - held) + [*range(1, held + 1)]
    assert rows[0]["context_tokens"] >= 100
    assert f"place {held} of the programs that start when there is room, within" in shown(bench)


def test_a_turn_that_found_no_memory_says_so(bench: Bench, settings: Any, model: Path) -> None:
    settings(policy="static-ttl", admission=False)
    bench = Bench(ContinuumScheduler, model, blocks=11)
    bench.send("runs", prompt(6 * BLOCK, 1), out=50)
    bench.step()
    bench.send("waits", prompt(6 * BLOCK, 2), out=50)
    bench.step()
    assert states(bench) == ["running", "waiting"]
    assert "place 1 of the turns that may run; no memory is free for it" in shown(bench)


def test_a_program_at_its_tool_is_told_with_its_pin_until_that_ends(bench: Bench) -> None:
    bench.turn("agent", prompt(4 * BLOCK, 1), this_func_call="pytest")
    bench.now_s += 2.0
    (row,) = said(bench)["programs"]
    assert (row["state"], row["tool"], row["turns"]) == ("in a tool call", "pytest", 1)
    assert row["pinned_s"] == pytest.approx(3.0, abs=0.2)
    assert said(bench)["memory"]["pinned_blocks"] == 4
    assert "pytest: pinned for 2.9 s more" in shown(bench) and "36% pinned" in shown(bench)
    bench.advance(10.0)
    assert "pytest: not pinned" in shown(bench)
    bench.turn("agent", prompt(4 * BLOCK, 1), this_func_call="no call")
    bench.now_s += SAME_ANSWER_S
    assert states(bench) == ["has answered"] and "no call" not in shown(bench)
    bench.turn("agent", prompt(4 * BLOCK, 1), is_last_step=True)
    bench.now_s += SAME_ANSWER_S
    assert said(bench)["programs"] == []


def test_a_tools_name_that_looks_like_markup_is_shown_as_it_is(bench: Bench) -> None:
    bench.turn("agent", prompt(4 * BLOCK, 1), this_func_call="[/b][link=http://x]pytest")
    assert "[/b][link=http://x]pytest: pinned" in shown(bench)


def test_names_are_hashes_and_requests_without_a_name_are_counted(bench: Bench) -> None:
    bench.send(None, prompt(BLOCK, 5), out=9)
    bench.send("secret-name", prompt(BLOCK, 6), out=9)
    bench.step()
    text = bench.scheduler.live.text()
    assert "secret" not in text
    assert said(bench)["memory"]["unnamed_running"] == 1
    assert len(said(bench)["programs"]) == 1


def test_names_are_those_of_the_recording(model: Path, settings: Any, tmp_path: Path) -> None:
    settings(run_output_dir=str(tmp_path), record_ids=True)
    bench = Bench(ContinuumScheduler, model)
    bench.send("run-42", prompt(BLOCK, 6), out=9)
    bench.step()
    assert said(bench)["programs"][0]["program"] == "run-42"
    path = bench.scheduler.live.save_recording().result(timeout=60)
    assert "run-42" in json.loads(Path(path).read_text())


def test_without_a_recording_there_is_no_file_to_name(bench: Bench) -> None:
    assert bench.scheduler.live.save_recording().result(timeout=60) == ""


def test_who_asks_often_gets_the_same_answer_and_long_tables_are_cut(model: Path, settings: Any) -> None:
    settings(policy="static-ttl")
    bench = Bench(ContinuumScheduler, model, blocks=4000, budget_tokens=4096)
    before = bench.scheduler.live.text()
    for i in range(MOST_ROWS + 7):
        bench.send(f"p{i}", prompt(4, i), out=9)
    bench.step(seconds=0.0)
    assert bench.scheduler.live.text() is before
    bench.now_s += SAME_ANSWER_S
    assert (len(said(bench)["programs"]), said(bench)["more"]) == (MOST_ROWS, 7)
    assert "7 programs more are not shown" in shown(bench)


def test_a_server_without_continuum_is_told_in_a_sentence(command: Command) -> None:
    with metrics_server(["vllm:x 1\n"]) as url:
        for words in (("top", url, "--once"), ("report", url)):
            assert "it does not run continuum, or its HTTP server is in Rust" in command.refused(*words)
