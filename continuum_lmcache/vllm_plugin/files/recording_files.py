"""The recorder's file: a snapshot on demand.

    RecordingWriter(Path("run"), recorder).flush()  # run/scheduler_timestamps

No failure of the disk reaches the engine: it is logged once, and counted.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from continuum_lmcache.errors import ConfigError
from continuum_lmcache.telemetry.recorder import META, Event, EventRecorder
from continuum_lmcache.vllm_plugin.files import write_whole

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

    def flush(self) -> bool:
        """Write the whole snapshot, or nothing. False if the disk refused it.

        Any thread may call it, also in a signal handler: the snapshot's lists are copies and its events never
        change.
        """
        snapshot = self._recorder.snapshot()
        snapshot[META][0]["lost"] = dict(self.lost)
        try:
            write_whole(self.path, pieces(snapshot))
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
