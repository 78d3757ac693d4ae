"""The report: figures checked by hand, side by side."""

from pathlib import Path

import pytest
from recorded import KEEP, PROTOTYPE, Run, printed, saved, written

from continuum_lmcache.recordings.metrics import measure, outcomes
from continuum_lmcache.recordings.reader import load
from continuum_lmcache.telemetry.recorder import META, EventRecorder
from continuum_lmcache.types import PinEnd


@pytest.fixture
def two_programs() -> EventRecorder:
    """Job a: 0 to 10 s, two turns, a pin reused after 2 s. Job b: 1 to 5 s, one turn, a pin that expires."""
    run = Run()
    run.turn("a", "a1", (0, 1, 4), prompt_tokens=100, keep=KEEP)
    run.turn("b", "b1", (1, 3, 5), prompt_tokens=200, keep=KEEP)
    run.unpinned(6, "a", PinEnd.REUSED)
    run.turn("a", "a2", (6, 6, 10), prompt_tokens=200, served=(90, 30, 20), tool=("pytest", "bash"))
    run.unpinned(8, "b", PinEnd.EXPIRED)
    return run.recorder


def test_the_figures_of_a_small_run_are_those_computed_by_hand(
    tmp_path: Path, two_programs: EventRecorder
) -> None:
    """JCT 10 and 4 s: mean 7, median 7, P95 = 4 + 0.95 * 6 = 9.7. Prompts 100 + 200 + 200, hits 140.

    Waits 1, 2, 0. Pins 2 s (reused) and 3 s (expired). Wall: 0 to 10.
    """
    found = measure(load(written(tmp_path, two_programs)))
    assert {k: v for k, v in found.items() if v is not None} == pytest.approx(
        {
            "programs": 2,
            "programs complete": 2,
            "turns": 3,
            "JCT, mean [s]": 7,
            "JCT, median [s]": 7,
            "JCT, P95 [s]": 9.7,
            "JCT, P99 [s]": 9.94,
            "JCT, max [s]": 10,
            "wall time [s]": 10,
            "cache hit ratio": 0.28,
            "  gpu part": 0.18,
            "  dram part": 0.06,
            "  ssd part": 0.04,
            "prefill saved [tokens]": 140,
            "prefill computed [tokens]": 360,
            "queue wait, mean [s]": 1,
            "queue wait, median [s]": 1,
            "queue wait, P95 [s]": 1.9,
            "queue wait, P99 [s]": 1.98,
            "queue wait, max [s]": 2,
            "preemptions": 0,
            "pins": 2,
            "pins open at the end": 0,
            "pin time, sum [s]": 5,
            "pin time, mean [s]": 2.5,
            "calibration error": 0.25,
        }
    )
    assert outcomes(load(written(tmp_path, two_programs))) == {"reused": [2], "expired": [3]}


def test_the_prototypes_readers_find_lists_of_events_everywhere(two_programs: EventRecorder) -> None:
    """They iterate over all entries and look for names in every event."""
    for history in two_programs.snapshot().values():
        assert all(isinstance(event, dict) for event in history)
    assert all("Request_arrival_time" not in event for event in two_programs.snapshot()[META])


def test_the_report_prints_every_table(tmp_path: Path, two_programs: EventRecorder) -> None:
    text = printed("report", written(tmp_path, two_programs))
    for word in ("JCT, P99 [s]", "cache hit ratio", "reused", "expired", "pytest", "predicted P(tau)"):
        assert word in text, word
    assert "missing" not in text


def test_two_runs_stand_side_by_side(tmp_path: Path, two_programs: EventRecorder) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "y").mkdir()
    first = written(tmp_path / "x", two_programs)
    second = saved(tmp_path / "y", PROTOTYPE)
    text = printed("report", "--compare", first, second)
    (row,) = [line for line in text.splitlines() if "JCT, max" in line]
    assert [float(cell) for cell in row.split("│")[2:5]] == [10, 7, 0.7]


def test_a_name_cannot_command_the_terminal(tmp_path: Path) -> None:
    run = Run()
    run.turn("a", "t", (0, 0, 1), tool=("\x1b[2Jls [red]", "bash"))
    text = printed("report", written(tmp_path, run.recorder))
    assert "\x1b[2J" not in text and "[red]" in text


def test_one_recording_or_two_must_be_named(tmp_path: Path) -> None:
    assert "two with --compare" in printed("report", status=2)
    assert "two with --compare" in printed("report", tmp_path, "--compare", tmp_path, tmp_path, status=2)
