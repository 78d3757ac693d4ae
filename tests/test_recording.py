"""The recorder's files on failing disks: the engine must not be affected."""

import contextlib
import json
import logging
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from continuum_lmcache.errors import ConfigError
from continuum_lmcache.telemetry.events import ProgramEnded, TurnArrived
from continuum_lmcache.telemetry.recorder import FORMAT, META, EventRecorder
from continuum_lmcache.tools.durations import ToolDurations
from continuum_lmcache.types import ProgramId, TurnId
from continuum_lmcache.vllm_plugin.files import EngineFiles, pieces, recording_path


def files(folder: Path, recorder: EventRecorder, rank: int = 0) -> EngineFiles:
    """What an engine that records has."""
    return EngineFiles(ToolDurations(), None, recorder, recording_path(folder, rank))


def turns(recorder: EventRecorder, count: int) -> None:
    """Two events a turn, a program a turn."""
    for number in range(count):
        recorder.record(TurnArrived(float(number), ProgramId(f"job-{number}"), TurnId("t"), 100))
        recorder.record(ProgramEnded(number + 0.5, ProgramId(f"job-{number}"), 1))


@contextlib.contextmanager
def files_no_longer_than(size_bytes: int) -> Iterator[None]:
    """A disk that fills up in the middle of a write: the kernel accepts a part, then refuses."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_flush_writes_the_prototypes_file_and_nothing_else(tmp_path: Path) -> None:
    recorder = EventRecorder(0.0)
    recording = files(tmp_path / "new" / "run", recorder)
    turns(recorder, 2)
    recording.save()
    recording.save()
    written = tmp_path / "new" / "run" / "scheduler_timestamps"
    assert list(json.loads(written.read_text())) == [META, "job-0", "job-1"]
    assert list(written.parent.iterdir()) == [written]


def test_a_directory_that_cannot_be_made_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"run_output_dir \(or RUN_OUTPUT_DIR\)"):
        recording_path(tmp_path / "file" / "run")


def test_a_disk_that_fills_up_keeps_the_last_whole_snapshot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = EventRecorder(0.0)
    recording, path = files(tmp_path, recorder), tmp_path / "scheduler_timestamps"
    turns(recorder, 3)
    recording.save()
    before = path.read_bytes()
    turns(recorder, 1_000)
    with files_no_longer_than(2_000), caplog.at_level(logging.WARNING):
        recording.save()
    assert "was not written: " in caplog.text
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    recording.save()
    assert len(json.loads(path.read_text())) > 1_000


def test_a_snapshot_is_written_in_small_pieces_that_read_as_one() -> None:
    recorder = EventRecorder(0.0)
    turns(recorder, 30)
    snapshot = {**recorder.snapshot(), "many": [{"n": n} for n in range(201)], "none": []}
    written = list(pieces(snapshot))
    assert json.loads("".join(written)) == snapshot
    assert max(text.count('"n"') for text in written) == 1


def test_a_signal_may_ask_for_a_file_at_any_moment(tmp_path: Path) -> None:
    recorder = EventRecorder(0.0, max_events=400)
    recording, path = files(tmp_path, recorder), tmp_path / "scheduler_timestamps"
    seen: list[threading.Thread] = []

    def asked(signum: int, frame: object) -> None:  # noqa: ARG001
        seen.append(recording.start_save())

    before = signal.signal(signal.SIGALRM, asked)
    try:
        while len(seen) < 20:
            signal.setitimer(signal.ITIMER_REAL, 0.003)  # once: it falls anywhere in what follows
            turns(recorder, 50)
            recording.save()
            assert json.loads(path.read_text())[META][0]["format"] == FORMAT
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    for thread in seen:
        thread.join()
    assert json.loads(path.read_text())[META][0]["format"] == FORMAT
    assert list(tmp_path.iterdir()) == [path]
