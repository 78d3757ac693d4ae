"""In the LMCache MP server: which tier each lookup's KV came from, and how long L2 took for it.

    LOOKUP ----- submit_prefetch_task ----> L2 is asked, and read, one task per adapter
       |            (names the request)        |  L2_PREFETCH_LOOKUP_SUBMITTED .. L2_LOAD_TASK_COMPLETED
       '-- MP_LOOKUP_PREFETCH_END: keys found in L1, keys read from L2

LMCache sends the engine only the sum. Its events have the parts, each under another id.
StorageManager.submit_prefetch_task has both ids, so it is wrapped (on the instance; LMCache 0.5.6).

It asks L2 for every key, also for those that L1 has, and L2 answers after the writes in its queue: seconds,
where the GPU computes more than the disk can take. So L2 is not asked where it cannot add anything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import Any

from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.mp_observability.event import Event, EventType

from connectors.lmcache_mp.wire import LookupResult
from continuum_lmcache.bounded_dict import BoundedDict

MAX_LOOKUPS = 10_000  # also of those without an end


class LookupLog:
    """Finished lookups with a hit, numbered in the tier log's own count.

    `needs_l2` tells of the keys of a lookup whether L2 may have one that L1 lacks.
    """

    def __init__(self, log: Any, context: Any, needs_l2: Callable[[Iterable[ObjectKey]], bool]) -> None:
        self._log, self._needs_l2 = log, needs_l2
        self._chunk_tokens: int = context.chunk_size
        self._done: deque[LookupResult] = deque(maxlen=MAX_LOOKUPS)
        self._tasks: BoundedDict[str, int] = BoundedDict(MAX_LOOKUPS)  # request -> the id of its prefetch
        # that id -> start, end
        self._reads: BoundedDict[int, tuple[float, float]] = BoundedDict(MAX_LOOKUPS)
        storage, event_bus = context.storage_manager, context.event_bus
        self._submit, storage.submit_prefetch_task = storage.submit_prefetch_task, self.submit
        event_bus.subscribe(EventType.L2_PREFETCH_LOOKUP_SUBMITTED, self.on_read_start)
        event_bus.subscribe(EventType.L2_LOAD_TASK_COMPLETED, self.on_read_end)
        event_bus.subscribe(EventType.MP_LOOKUP_PREFETCH_END, self.on_lookup_end)

    def submit(self, spec: Any, external_request_id: str = "", skip_l2: bool = False) -> Any:
        """StorageManager.submit_prefetch_task, from which we take both ids."""
        skip_l2 = skip_l2 or not self._needs_l2(key for row in spec.key_groups for key in row.keys)
        handle = self._submit(spec, external_request_id, skip_l2)
        self._tasks[external_request_id] = handle.prefetch_request_id
        return handle

    def on_read_start(self, event: Event) -> None:
        task = event.metadata["request_id"]
        self._reads[task] = self._reads.get(task, (event.timestamp, event.timestamp))

    def on_read_end(self, event: Event) -> None:
        task = event.metadata["request_id"]
        if task in self._reads:
            self._reads[task] = (self._reads[task][0], event.timestamp)

    def on_lookup_end(self, event: Event) -> None:
        found = event.metadata
        keys, from_l2 = found["l1_hit_keys"] + found["l2_hit_keys"], found["l2_hit_keys"]
        task = self._tasks.pop(event.session_id, None)
        start_s, end_s = self._reads.pop(task, (0.0, 0.0)) if task is not None else (0.0, 0.0)
        if not found["found_count"]:
            return
        ssd_tokens = found["found_count"] * from_l2 // keys * self._chunk_tokens
        with self._log.lock:
            number = self._log.next_number()
            self._done.append(LookupResult(number, event.session_id, ssd_tokens, end_s - start_s))

    def since(self, number: int) -> list[LookupResult]:
        """The lookups after `number`, oldest first. The caller holds the log's lock."""
        return list(takewhile(lambda lookup: lookup.number > number, reversed(self._done)))[::-1]
