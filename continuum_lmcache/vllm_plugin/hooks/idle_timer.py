"""Wakes an idle engine when a pin expires, so that its memory is reported as free without polling.

vLLM calls schedule() only while there is work. Seam, unchanged from vLLM 0.30 to 0.33:
EngineCoreProc._process_input_queue, where an idle engine sleeps in input_queue.get() of a queue.Queue, and
goes on to a step after queue.Empty.
"""

from __future__ import annotations

from queue import Queue
from typing import Any

from continuum_lmcache.vllm_plugin.hooks import wrapping


def install() -> None:
    """Have each engine with our scheduler sleep no longer than that allows. Once a process."""
    from vllm.v1.engine.core import EngineCoreProc

    stock = EngineCoreProc._process_input_queue

    @wrapping.hook(EngineCoreProc)
    def _process_input_queue(self: Any) -> Any:
        queue, idle_s = self.input_queue, getattr(self.scheduler, "idle_s", None)
        if idle_s is not None and "get" not in vars(queue):
            queue.get = lambda block=True: Queue.get(queue, block, idle_s() if block else None)
        return stock(self)
