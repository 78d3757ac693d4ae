"""When loads and stores with an MP server begin and end, polled by a thread, not once a step.

    the step's forward runs        | the server's earlier transfers  | the transfer
    submitted            its event has ended                         begins        its future has ended

A GPU's transfers are submitted after the step's forward, whose event the server waits for. The server
executes them in order. A worker that looks once a step measures the step's time, not theirs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

POLL_S = 0.001  # between two polls of the running transfers


class WatchedFuture:
    """LMCache's future for two threads. LMCache's own imports the server's event at its first query."""

    def __init__(self, future: Any) -> None:
        self._future, self._lock = future, threading.Lock()

    def query(self) -> bool:
        with self._lock:
            return bool(self._future.query())

    def result(self, timeout: float | None = None) -> Any:
        with self._lock:
            return self._future.result(timeout=timeout)

    def wait(self, timeout: float | None = None) -> bool:
        with self._lock:
            return bool(self._future.wait(timeout))


@dataclass(eq=False, slots=True)
class Transfer:
    request_id: str
    is_load: bool
    tokens: int
    submitted_s: float
    future: WatchedFuture
    event: Any  # what the server waits for; None: the transfer ended as it was submitted
    give_up_s: float  # when it counts as failed
    ready_s: float | None = None  # when that event had ended
    duration_s: float | None = None  # of the transfer alone


class TransferWatch:
    """Polls all running transfers each POLL_S, where they do not end as they are submitted."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # of the fields below
        self._running: list[Transfer] = []
        self._link_free_s = 0.0  # when the last transfer ended
        self._is_busy = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None

    def add(self, transfer: Transfer) -> None:
        if transfer.event is None:
            transfer.ready_s = transfer.submitted_s
        with self._lock:
            self._running.append(transfer)
        if transfer.event is None:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="continuum-mp-transfers", daemon=True)
            self._thread.start()
        self._is_busy.set()

    @property
    def running(self) -> list[Transfer]:
        with self._lock:
            return [*self._running]

    def remove(self, transfers: list[Transfer]) -> None:
        with self._lock:
            self._running = [running for running in self._running if running not in transfers]

    def poll(self) -> list[Transfer]:
        """Note which transfers have begun and ended since the last call. Returns all that have ended."""
        with self._lock:
            now_s = self._clock()
            for transfer in self._running:
                if transfer.ready_s is None and transfer.event.query():
                    transfer.ready_s = now_s
            ended = [transfer for transfer in self._running if transfer.future.query()]
            fresh = [t for t in ended if t.ready_s is not None and t.duration_s is None]
            if fresh:
                began_s = max(self._link_free_s, min(t.ready_s for t in fresh if t.ready_s is not None))
                whole = max(1, sum(transfer.tokens for transfer in fresh))
                for transfer in fresh:
                    transfer.duration_s = (now_s - began_s) * transfer.tokens / whole
                self._link_free_s = now_s
            return ended

    def close(self) -> None:
        self._closing = True
        self._is_busy.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def _watch(self) -> None:
        while self._is_busy.wait() and not self._closing:
            self.poll()
            with self._lock:
                if all(transfer.duration_s is not None for transfer in self._running):
                    self._is_busy.clear()
            time.sleep(POLL_S)
