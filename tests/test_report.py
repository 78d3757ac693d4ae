"""The report: its figures, and that it leaks and fetches nothing."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from console import Command
from hypothesis import given
from hypothesis import strategies as st
from recorded import KEEP, Run, recording, saved, written

from continuum_lmcache.recordings.reader import RecordedEvent, facts_of, load
from continuum_lmcache.types import PinEnd

pytest.importorskip("plotly")

from continuum_lmcache.console import top as tops
from continuum_lmcache.report import charts
from continuum_lmcache.report import page as pages
from continuum_lmcache.report.charts import RUNNING_KV, curves, spans
from continuum_lmcache.report.page import rows

HOSTILE = "</script><script>document.title='taken'</script><b>"


def story(name: str = "a") -> Run:
    """Program a: 0..10 s, two turns, a pin reused; b: one turn, a pin that expires; a hostile name."""
    run = Run()
    run.turn(name, "a1", (0, 1, 4), prompt_tokens=100, keep=KEEP)
    run.turn("b", "b1", (1, 3, 5), prompt_tokens=200, keep=KEEP)
    run.unpinned(6, name, PinEnd.REUSED)
    run.turn(name, "a2", (6, 6.5, 10), prompt_tokens=200, served=(90, 30, 20), tool=(HOSTILE, "bash"))
    run.unpinned(8, "b", PinEnd.EXPIRED)
    run.turn(HOSTILE, "c1", (2, 3, 4))
    return run


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of two runs, written once: the second has the first's story, and a job of 7 s in b's place."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "x").mkdir()
    (folder / "y").mkdir()
    other = Run()
    other.turn("c", "c1", (0, 1, 7))
    runs = [written(folder / "x", story().recorder), written(folder / "y", other.recorder)]
    path = folder / "report.html"
    path.write_text(pages.page([load(run) for run in runs]))
    return path


# charts -----------------------------------------------------------------------


def test_a_programs_states_are_the_recordings_own_times(tmp_path: Path) -> None:
    run = load(written(tmp_path, story().recorder))
    a = next(program for program in run.programs if program.id == "a")
    found = [(s.state, s.start_s - run.start_s, s.end_s - run.start_s) for s in spans(a, run.end_s)]
    assert [(state, round(start_s, 3), round(end_s, 3)) for state, start_s, end_s in found] == [
        ("queued", 0, 1),
        ("running", 1, 4),
        ("tool", 4, 6),
        ("queued", 6, 6.5),
        ("loading", 6.5, 6.5),  # 50 tokens; for how long is not recorded
        ("running", 6.5, 10),
        ("pinned", 4, 6),
    ]


def test_what_was_going_on_at_the_end_lasts_until_then(tmp_path: Path) -> None:
    run = load(
        saved(tmp_path, recording({"runs": [arrival(100.0), start(101.0)], "waits": [arrival(109.0)]}))
    )
    runs, waits = ([(s.state, s.start_s, s.end_s) for s in spans(p, run.end_s)] for p in run.programs)
    assert runs == [("queued", 100, 101), ("running", 101, 109)] and waits == [("queued", 109, 109)]


def arrival(at_s: float, turn: str = "t") -> dict[str, Any]:
    return {"Request_arrival_time": at_s, "turn": turn, "prompt_length": 9}


def start(at_s: float, turn: str = "t") -> dict[str, Any]:
    served = dict.fromkeys(("gpu_tokens", "dram_tokens", "ssd_tokens"), 0)
    return {"waiting_to_running": at_s, "turn": turn, "prompt_length": 9, **served}


def end(at_s: float, turn: str = "t") -> dict[str, Any]:
    made = {"output_tokens": 1, "first_token_s": None, "tool": [], "retention": None}
    return {"Request_departure_time": at_s, "turn": turn, **made}


steps = st.lists(st.floats(0, 50, allow_subnormal=False).map(lambda x: round(x, 3)), min_size=3, max_size=12)


def test_the_curves_count_who_runs_who_waits_and_what_is_pinned(tmp_path: Path) -> None:
    run = load(written(tmp_path, story().recorder))

    def level(name: str, at_s: float) -> int:
        return [0, *(level for since_s, level in curves(run)[name] if since_s <= at_s)][-1]

    assert [level("waiting", at_s) for at_s in (0.5, 2.5, 3.5, 6.2)] == [1, 2, 0, 1]
    assert [level("running", at_s) for at_s in (0.5, 3.5, 5.5, 7.0)] == [0, 3, 0, 1]
    prompts = sum(turn.prompt_tokens for turn in run.turns if turn.started_s <= run.start_s + 3.5)
    assert [level(RUNNING_KV, at_s) for at_s in (0.5, 3.5, 5.5)] == [0, prompts, 0] and prompts > 0
    blocks = [pin.blocks for program in run.programs for pin in program.pins]
    assert level("pinned blocks", 5.5) == sum(blocks) and level("pinned blocks", 9.0) == 0
    assert all(points[-1][1] == 0 for points in curves(run).values())


def test_where_one_turn_ends_and_another_begins_a_curve_shows_no_other_level(tmp_path: Path) -> None:
    run = Run()
    run.turn("a", "a1", (0, 0, 1))
    run.turn("a", "a2", (1, 1, 2))
    found = curves(load(written(tmp_path, run.recorder)))
    assert found["running"] == [(0, 1), (1, 1), (2, 0)]
    assert found["waiting"] == [(0, 0), (1, 0)]


@given(steps)
def test_a_program_is_in_one_state_at_a_time_but_for_its_pin(gaps_s: list[float]) -> None:
    """Its queued, loading, running and tool spans follow each other without a hole or an overlap."""
    events: list[dict[str, Any]] = []
    now_s = 0.0
    for i, step_s in enumerate(gaps_s):
        now_s = round(now_s + step_s, 3)
        events.append((arrival, start, end)[i % 3](now_s, f"t{i // 3}"))
    with tempfile.TemporaryDirectory() as folder:
        run = load(saved(Path(folder), recording({"p": events})))
    (program,) = run.programs
    mine = list(spans(program, run.end_s))
    for earlier, later in zip(mine, mine[1:], strict=False):
        assert later.start_s == pytest.approx(earlier.end_s, abs=1e-5)
    assert mine[0].start_s == run.start_s


# the page -----------------------------------------------------------------------


def test_the_page_is_whole_in_itself(page: Path) -> None:
    """Nothing is linked, and the page's own policy forbids to fetch anything."""
    text = page.read_text()
    outside = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert not re.findall(r"(?:src|href)\s*=", outside)
    assert "default-src 'none'" in outside
    assert page.stat().st_size < 8e6


def test_two_runs_stand_side_by_side_with_a_summary_each(page: Path) -> None:
    text = page.read_text()
    row = re.search(r"<tr><td>time of a program, s: longest</td>(.*?)</tr>", text)
    assert row is not None
    assert re.findall(r"<td>(.*?)</td>", row[1]) == ["10.000", "7.000"]
    assert re.findall(r"<th>([^<]+)</th>", text) == ["x", "y"], "runs have their own names"
    assert "3 programs with 4 turns ran on Llama" in text and "1 program with 1 turn ran" in text


def test_a_picture_that_leaves_programs_out_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "PROGRAMS_SHOWN", 2)
    text = pages.page([load(written(tmp_path, story().recorder))])
    assert "what each program was doing (the first 2, 1 more)</h2>" in text


def test_no_client_can_write_into_the_page(page: Path) -> None:
    assert HOSTILE not in page.read_text()


def test_the_command_writes_the_page_and_says_what_ran(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "out.html"
    ran = command("report", written(tmp_path, story().recorder), "--out", out)
    assert ran.status == 0 and str(out) in ran.out and "3 programs with 4 turns" in ran.out
    assert out.exists()


def test_a_servers_run_is_called_by_its_address(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = written(tmp_path, story().recorder)
    monkeypatch.setattr(
        tops, "save_recordings", lambda _, folder: shutil.copy(run, folder / "scheduler_timestamps")
    )
    (found,) = command("report", "http://gpu:8000", "--json").json["runs"]
    assert found["name"] == "http://gpu:8000"


def test_the_figures_come_as_json_without_a_page(command: Command, tmp_path: Path) -> None:
    run = written(tmp_path, story().recorder)
    (found, again) = command("report", run, run, "--json").json["runs"]
    assert found == again and found["pins"] == {"taken": 2, "reused": 1}
    assert found["summary"].startswith("3 programs") and not (tmp_path / "report.html").exists()


def test_one_program_is_explained_by_its_events_and_decisions(command: Command, tmp_path: Path) -> None:
    keep = replace(KEEP, benefit_s=1.5, reload_s=0.4)  # T * eta + PrefillReload, and the second alone
    run = Run()
    run.turn("a", "a1", (0, 1, 4), prompt_tokens=100, keep=keep)
    run.unpinned(6, "a", PinEnd.REUSED)
    run.turn("b", "b1", (1, 2, 3))
    path = written(tmp_path, run.recorder)
    ran = command("report", path, "--program", "a")
    kinds = [line.split()[2] for line in ran.out.splitlines()]
    assert kinds == ["Request_arrival", "waiting_to_running", "Request_departure", "pinned", "unpinned"]
    for words in (
        "4.000 s",
        "ttl_s 3,",
        "probability 0.75",
        "benefit_s 1.5",
        "reload_s 0.4",
        "outcome reused",
    ):
        assert words in ran.out
    assert "no program 'c'" in command.refused("report", path, "--program", "c")


def test_a_wall_time_is_shown_by_how_long_after_its_event_it_is_and_without_noise() -> None:
    event = {"pinned_time": 1_796_000_000.0, "deadline": 1_796_000_003.25, "queue_delay_s": 0.00080581}
    said = facts_of(RecordedEvent("p", "here", "pinned_time", 1_796_000_000.0, event))
    assert said == "deadline +3.250 s, queue_delay_s 0.001"


def test_figures_have_names_in_words_and_thousands_separators() -> None:
    found = {"prompt_tokens": {"GPU": 1_234_567}, "seconds": 1234.5, "first_token_s": {"mean": 0.25}}
    assert dict(rows(found)) == {
        "prompt tokens by source: GPU": "1,234,567",
        "length, s": "1,234",
        "first token after, s: mean": "0.250",
    }


def test_a_recording_of_the_prototype_is_refused_in_a_sentence(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "scheduler_timestamps"
    path.write_text(json.dumps({"job-1": [{"Request_arrival_time": 1.0, "prompt_length": 9}]}))
    assert "a recording of Continuum's prototype" in command.refused("report", path)


def test_bad_input_ends_in_one_line(command: Command, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no recording here" in command.refused("report", tmp_path / "empty")
    assert "no recording here" in command.refused("report", tmp_path / "none")
    path = written(tmp_path, story().recorder)
    assert "No such file" in command.refused("report", path, "--out", tmp_path / "no" / "r.html")
    path.write_text(path.read_text()[:-20])
    assert "not JSON" in command.refused("report", path, "--json")
