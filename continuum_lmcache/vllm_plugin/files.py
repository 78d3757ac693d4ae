"""The files that an engine reads and writes: learned tool durations, and its recording.

Written at shutdown and on signals, by a thread: a disk that hangs must stop neither the engine nor a signal
handler. No failure of the disk reaches the engine: it is logged.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from continuum_lmcache.errors import ConfigError, DurationsError
from continuum_lmcache.telemetry.recorder import Event, EventRecorder
from continuum_lmcache.tools.durations import ToolDurations

logger = logging.getLogger(__name__)

RECORDING = "scheduler_timestamps"  # the public prototype's name, which its tools look for
MAX_BYTES = 64 << 20  # of durations; with all tenants' full windows about 25 MB
JOIN_S = 5.0  # how long the engine's end waits for the disk


@dataclass(slots=True)
class EngineFiles:
    """What one engine writes. A path that is None: that file is not wanted."""

    durations: ToolDurations
    durations_path: Path | None = None
    recorder: EventRecorder | None = None
    recording_path: Path | None = None
    _saving: threading.Lock = field(default_factory=threading.Lock)  # an older save must not end last

    def save(self) -> None:
        """Write both files, each all or nothing. Other threads may change what is written meanwhile."""
        with self._saving:
            if self.recorder is not None and self.recording_path is not None:
                write_whole(self.recording_path, pieces(self.recorder.snapshot()))
            if self.durations_path is not None:
                write_whole(self.durations_path, [self.durations.dumps()])

    def start_save(self) -> threading.Thread:
        thread = threading.Thread(target=self.save, name="continuum-files", daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """The last save, at shutdown. It may take JOIN_S."""
        last = self.start_save()
        last.join(JOIN_S)
        if last.is_alive():
            logger.warning("files not saved within %g s; the disk does not answer", JOIN_S)

    def save_on_signals(self) -> None:
        """On SIGUSR1 the files are written. On SIGTERM too, while vLLM's own handler runs.

        vLLM gives an engine its shutdown timeout and then kills it: a busy one may not reach shutdown().
        """
        signal.signal(signal.SIGUSR1, lambda *_: self.start_save())
        stock = signal.getsignal(signal.SIGTERM)
        if not callable(stock):
            return

        def save_then_stop(number: int, frame: Any) -> None:
            self.start_save()
            stock(number, frame)

        signal.signal(signal.SIGTERM, save_then_stop)


def owns_process() -> bool:
    """Whether this is an engine's own process; an application (in-process `LLM`) keeps its signals.

    Read on vLLM 0.30 to 0.33: CoreEngineProcManager names them "EngineCore" or "EngineCore_DP<rank>".
    """
    named = multiprocessing.current_process().name.startswith("EngineCore")
    return named and threading.current_thread() is threading.main_thread()


def path_of_rank(path: Path, rank: int) -> Path:
    """The file of one data-parallel rank: engines may share a folder, not a file."""
    return path.with_name(f"{path.name}_dp{rank}") if rank else path


def recording_path(folder: Path, rank: int = 0) -> Path:
    """The recording's file in this folder, which is made. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(
            f"recordings cannot go to {folder}: {error}; set continuum.run_output_dir "
            "(or RUN_OUTPUT_DIR) to a directory this process may write, or to nothing"
        ) from error
    return path_of_rank(folder / RECORDING, rank)


def load_durations(path: Path) -> ToolDurations:
    """The durations learned before. An unusable file is set aside with a warning, never an error: as
    `.corrupt`, where an older file of that name is replaced."""
    try:
        try:
            if path.stat().st_size > MAX_BYTES:
                raise DurationsError(f"{path} is larger than {MAX_BYTES} bytes")
            return ToolDurations.loads(path.read_text(encoding="utf-8"))
        except (DurationsError, UnicodeDecodeError) as error:
            aside = path.replace(path.with_name(path.name + ".corrupt"))
            logger.warning("Tool durations in %s are unusable (%s); set aside as %s", path, error, aside)
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("Cannot read tool durations from %s (%s); starting without them", path, error)
    return ToolDurations()


def pieces(snapshot: dict[str, list[Event]]) -> Iterator[str]:
    """The snapshot as JSON, one event at a time: in between other threads may run."""
    for number, (name, events) in enumerate(snapshot.items()):
        yield f"{', ' if number else '{'}{json.dumps(name)}: ["
        yield from (", " * (at > 0) + json.dumps(event) for at, event in enumerate(events))
        yield "]"
    yield "}"


def write_whole(path: Path, texts: Iterable[str]) -> None:
    """Write a file that only its owner reads: a reader sees the old file or the new one.

    Returns when it is on the disk. A failure is logged, and leaves no draft.
    """
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.unlink(missing_ok=True)  # in a folder that others may write it could be theirs, or a link
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.writelines(texts)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        logger.warning("%s was not written: %s", path, error)
        with suppress(OSError):
            draft.unlink(missing_ok=True)
