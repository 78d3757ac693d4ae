"""The recorder's files: a snapshot on demand and, if wanted, a stream of events.

    recording = Recording(Path("run"), recorder, stream=True)
    ...
    recording.close()  # run/scheduler_timestamps and run/scheduler_timestamps.jsonl

Nothing that happens to a disk reaches the engine: it is said once, and counted.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import queue
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from continuum_lmcache.errors import ConfigError
from continuum_lmcache.telemetry.recorder import META, Event, EventRecorder

logger = logging.getLogger(__name__)

NAME = "scheduler_timestamps"  # the public prototype's, which its tools look for
QUEUE_EVENTS = 50_000  # some tens of MB when the disk stands still
BATCH_EVENTS = 1_000
BATCH_WAIT_S = 0.2
JOIN_S = 5.0  # a disk that hangs must not keep the engine from stopping


class RecordingWriter:
    """Writes what `recorder` holds into `directory`, one run a directory.

    `rank` is the data-parallel rank: engines share a directory, not a file. Raises ConfigError if
    the directory cannot be made; later failures count in `lost` and warn once a kind.
    """

    def __init__(self, directory: Path, recorder: EventRecorder, rank: int = 0, stream: bool = False) -> None:
        self.path = directory / (f"{NAME}_dp{rank}" if rank else NAME)
        lines = self.path.with_name(f"{self.path.name}.jsonl")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lines.unlink(missing_ok=True)  # an older run's
        except OSError as error:
            raise ConfigError(
                f"recordings cannot go to {directory}: {error}; set continuum.run_output_dir "
                "(or RUN_OUTPUT_DIR) to a directory this process may write, or to nothing"
            ) from error
        self._recorder = recorder
        self._flush_failures = 0
        self._drafts = itertools.count()
        self._stream: EventStream | None = None
        if stream:
            self._stream = recorder.sink = EventStream(lines)
            self._stream.write({META: recorder.header()})

    @property
    def lost(self) -> Counter[str]:
        """Failures by kind: "flush" in files, "queue" and "disk" in streamed events."""
        streamed = self._stream.lost if self._stream else Counter[str]()
        return streamed + Counter(flush=self._flush_failures)

    def flush(self) -> bool:
        """Write the whole snapshot, whole or not at all. False if the disk refused.

        From any thread: the snapshot's lists are copies and its events never change. A signal handler may
        find another flush half done, so each has a draft of its own.
        """
        snapshot = self._recorder.snapshot()
        snapshot[META][0]["lost"] = dict(self.lost)
        draft = self.path.with_name(f"{self.path.name}.{os.getpid()}-{next(self._drafts)}.tmp")
        try:
            write_whole(draft, pieces(snapshot))
            draft.replace(self.path)
        except OSError as error:
            self._flush_failures += 1
            if self._flush_failures == 1:
                logger.warning("recording not written to %s: %s (said once)", self.path, error)
            return False
        return True

    def close(self) -> None:
        """Write everything and stop the thread. Safe to call twice."""
        if self._stream is not None:
            self._recorder.sink = None
            self._stream.close()
        self.flush()


class EventStream:
    """Events as lines of JSON, written by a thread of its own from a bounded queue."""

    def __init__(self, path: Path, max_events: int = QUEUE_EVENTS) -> None:
        self._path = path
        self._counts: Counter[str] = Counter()
        self._queue: queue.Queue[Event] = queue.Queue(max_events)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="continuum-recording", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> Counter[str]:
        """Events that reached no file: "queue" was full, "disk" refused."""
        return Counter(self._counts)

    def write(self, event: Event) -> None:
        """Hand one event to the thread; count it if the thread is too far behind."""
        try:
            self._queue.put_nowait(event)
        except queue.Full:
            self._lose("queue", 1, "the disk is too slow")

    def close(self) -> None:
        """Write what waits, for up to JOIN_S."""
        self._stopping.set()
        self._thread.join(JOIN_S)
        if self._thread.is_alive():
            self._lose("disk", self._queue.qsize(), f"no answer in {JOIN_S:g} s")

    def _run(self) -> None:
        while not (self._stopping.is_set() and self._queue.empty()):
            batch = self._batch()
            lines = "".join(json.dumps(event) + "\n" for event in batch)
            try:
                append_whole(self._path, lines.encode("ascii"))
            except OSError as error:
                self._lose("disk", len(batch), str(error))

    def _batch(self) -> list[Event]:
        batch: list[Event] = []
        try:
            batch.append(self._queue.get(timeout=BATCH_WAIT_S))
            while len(batch) < BATCH_EVENTS:
                batch.append(self._queue.get_nowait())
        except queue.Empty:
            pass  # that was all
        return batch

    def _lose(self, kind: str, events: int, why: str) -> None:
        self._counts[kind] += events
        if self._counts[kind] == events:
            logger.warning("streamed events lost at %s: %s (said once, then counted)", self._path, why)


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
    """Write a file and wait until it lies on the disk; leave none behind on failure."""
    try:
        with path.open("w", encoding="ascii") as file:
            file.writelines(texts)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        path.unlink(missing_ok=True)
        raise


def append_whole(path: Path, data: bytes) -> None:
    """Append all of `data` or, where the disk fills up half way, none of it.

    The file is opened anew each time: a directory that was deleted is noticed that way.
    """
    if not data:
        return
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            file.truncate(before)
            raise
