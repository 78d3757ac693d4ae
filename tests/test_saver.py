"""Files that a separate thread writes while the engine runs."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench import Bench, prompt
from waiting import wait_for

from continuum_lmcache.tools.durations import ToolDurations
from continuum_lmcache.vllm_plugin import assembly, files
from continuum_lmcache.vllm_plugin.scheduler import ContinuumScheduler

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


@pytest.fixture
def bench(model: Path, settings: Any, tmp_path: Path) -> Iterator[Bench]:
    settings(tool_durations_file=tmp_path / "gaps.json", run_output_dir=tmp_path / "run")
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    made = Bench(ContinuumScheduler, model)
    yield made
    made.scheduler.shutdown()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_an_engine_inside_an_application_leaves_the_applications_signals_alone(
    model: Path, settings: Any, tmp_path: Path
) -> None:
    settings(run_output_dir=tmp_path / "run")
    before = [signal.getsignal(number) for number in SIGNALS]
    bench = Bench(ContinuumScheduler, model)
    assert [signal.getsignal(number) for number in SIGNALS] == before
    bench.scheduler.shutdown()


def test_what_was_learned_is_written_at_the_engines_end(bench: Bench, tmp_path: Path) -> None:
    bench.engine.learned.gaps.observe(("bash",), 4.0)
    path, recording = tmp_path / "gaps.json", tmp_path / "run" / "scheduler_timestamps"
    assert not path.exists() and not recording.exists()
    bench.parts.files.close()
    assert ToolDurations.loads(path.read_text()).exact(("bash",)).n == 1
    assert recording.stat().st_mode & 0o777 == path.stat().st_mode & 0o777 == 0o600


def test_a_disk_that_hangs_keeps_neither_a_signal_nor_the_engines_end_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, goes_on, stopped = threading.Event(), threading.Event(), threading.Event()
    monkeypatch.setattr(os, "fsync", lambda _: hangs.set() or goes_on.wait())
    monkeypatch.setattr(files, "JOIN_S", 0.1)
    saved = files.EngineFiles(ToolDurations(), tmp_path / "gaps.json")
    before = {number: signal.signal(number, lambda *_: stopped.set()) for number in SIGNALS}
    saved.save_on_signals()
    saved.start_save()
    assert hangs.wait(30)
    signal.raise_signal(signal.SIGTERM)
    assert stopped.is_set(), "vLLM's own handler"
    saved.close()
    goes_on.set()
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_has_the_files_written_by_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, logged: Any
) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "_name", "EngineCore")
    said = logged(assembly, "info")
    bench: Bench = request.getfixturevalue("bench")
    assert any(line.endswith(f"kill -USR1 {os.getpid()} writes it now") for line in said)
    bench.turn("p", prompt(40))
    threads, write = [], files.write_whole
    monkeypatch.setattr(
        files, "write_whole", lambda *args: threads.append(threading.current_thread()) or write(*args)
    )
    signal.raise_signal(signal.SIGUSR1)
    path = tmp_path / "run" / "scheduler_timestamps"
    wait_for(path.exists)
    assert "p" in json.loads(path.read_text()) and threads[0] is not threading.main_thread()


@pytest.mark.parametrize("planted", ["link", "file"])
def test_a_file_that_others_planted_under_a_drafts_name_is_not_written_to(
    tmp_path: Path, planted: str
) -> None:
    """In a shared folder: a link's target would be overwritten, and a file's mode would stay."""
    path, theirs = tmp_path / "scheduler_timestamps", tmp_path / "theirs"
    theirs.write_text("theirs")
    theirs.chmod(0o666)
    draft = tmp_path / f"scheduler_timestamps.{os.getpid()}.tmp"
    (draft.symlink_to if planted == "link" else draft.hardlink_to)(theirs)
    files.write_whole(path, ["ours"])
    assert theirs.read_text() == "theirs" and path.read_text() == "ours"
    assert not path.is_symlink() and path.stat().st_mode & 0o777 == 0o600


def test_a_draft_that_is_in_the_way_and_cannot_be_removed_costs_a_line_of_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / f"gaps.json.{os.getpid()}.tmp").mkdir()
    files.write_whole(tmp_path / "gaps.json", ["ours"])
    assert "was not written" in caplog.text and not (tmp_path / "gaps.json").exists()
