"""Wakes an idle engine when a pin expires, so that its memory is reported as free without polling.

vLLM calls schedule() only while there is work. Seam, unchanged from vLLM 0.30 to 0.33:
EngineCoreProc._process_input_queue (where an idle engine sleeps) and EngineCoreRequestType.WAKEUP.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

from continuum_lmcache.vllm_plugin.hooks import wrapping

LONGEST_SLEEP_S = 3600.0  # the longest that a thread can wait for differs between systems


def install() -> None:
    """Give each engine's scheduler a way to wake it. Once a process, when our scheduler is built."""
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core import EngineCoreProc

    stock = EngineCoreProc._process_input_queue

    @wrapping.hook(EngineCoreProc)
    def _process_input_queue(self: Any) -> Any:
        before_idle = getattr(self.scheduler, "before_idle", None)
        if before_idle is not None:
            before_idle(lambda: self.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None)))
        return stock(self)


class IdleTimer:
    """Calls `callback` at a set time. One long-lived thread; setting it again replaces the time."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._at_s: float | None = None
        self._wakes_s = math.inf  # when its thread wakes next
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="continuum-idle-timer", daemon=True)
        self._thread.start()

    def set(self, at_s: float | None) -> None:
        """Call it at `at_s` on time.monotonic()'s clock; None: not at all.

        The thread is woken only if it would sleep for too long: each turn's end sets another time, mostly a
        later one.
        """
        if at_s != self._at_s:
            with self._changed:
                self._at_s = at_s
                if at_s is not None and at_s < self._wakes_s:
                    self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                at_s = self._at_s
                if at_s is not None and at_s <= time.monotonic():
                    self._at_s = None
                    self._callback()
                else:
                    self._wakes_s = math.inf if at_s is None else at_s
                    left_s = math.inf if at_s is None else max(0.0, at_s - time.monotonic())
                    self._changed.wait(min(left_s, LONGEST_SLEEP_S))
