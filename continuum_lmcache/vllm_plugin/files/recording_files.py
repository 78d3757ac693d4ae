"""The recorder's file: a snapshot on demand.

    RecordingWriter(Path("run"), recorder).flush()  # run/scheduler_timestamps

No failure of the disk reaches the engine: it is logged once, and counted.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from continuum_lmcache.errors import ConfigError
from continuum_lmcache.telemetry.recorder import META, Event, EventRecorder

logger = logging.getLogger(__name__)

NAME = "scheduler_timestamps"  # the public prototype's, which its tools look for
BATCH_EVENTS = 1_000


class RecordingWriter:
    """Writes the contents of `recorder` into `directory`, one run per directory.

    `rank` is the data-parallel rank: engines share a directory, not a file. Raises ConfigError if
    the directory cannot be made; later failures count in `lost` and warn once.
    """

    def __init__(self, directory: Path, recorder: EventRecorder, rank: int = 0) -> None:
        self.path = directory / (f"{NAME}_dp{rank}" if rank else NAME)
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"recordings cannot go to {directory}: {error}; set continuum.run_output_dir "
                "(or RUN_OUTPUT_DIR) to a directory this process may write, or to nothing"
            ) from error
        self._recorder = recorder
        self.lost: Counter[str] = Counter()  # "flush": snapshots that the disk refused
        self._drafts = itertools.count()

    def flush(self) -> bool:
        """Write the whole snapshot, or nothing. False if the disk refused it.

        Any thread may call it: the snapshot's lists are copies and its events never change. A signal
        handler may interrupt another flush, so each has its own draft.
        """
        snapshot = self._recorder.snapshot()
        snapshot[META][0]["lost"] = dict(self.lost)
        draft = self.path.with_name(f"{self.path.name}.{os.getpid()}-{next(self._drafts)}.tmp")
        try:
            write_whole(draft, pieces(snapshot))
            draft.replace(self.path)
        except OSError as error:
            self.lost["flush"] += 1
            if self.lost["flush"] == 1:
                logger.warning("recording not written to %s: %s (logged once)", self.path, error)
            return False
        return True


def pieces(snapshot: dict[str, list[Event]]) -> Iterator[str]:
    """The snapshot as JSON, BATCH_EVENTS at a time: in between other threads may run."""
    opening = "{"
    for name, events in snapshot.items():
        yield f"{opening}{json.dumps(name)}: ["
        for at in range(0, len(events), BATCH_EVENTS):
            yield ", " * bool(at) + json.dumps(events[at : at + BATCH_EVENTS])[1:-1]
        yield "]"
        opening = ", "
    yield "}"


def write_whole(path: Path, texts: Iterable[str]) -> None:
    """Write a file that only its owner reads, and wait until it is on the disk; leave none behind on
    failure."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.writelines(texts)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        path.unlink(missing_ok=True)
        raise
