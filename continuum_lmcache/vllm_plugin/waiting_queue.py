"""The waiting queue: a heap whose keys are snapshots, so that no later change can corrupt it.

add, pop, peek, remove and rekey are O(log n) amortised. Replaces vLLM's own queues
(RequestQueue, unchanged from vLLM 0.30 to 0.33).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request

Key = tuple[Any, ...]  # the first is True for a request that is held, or waits for input: it sorts last


class ProgramQueue(RequestQueue):
    """Requests in the order of `key(request)`; equal keys in the order of their arrival."""

    def __init__(self, key: Callable[[Request], Key], on_peek: Callable[[], None] = lambda: None) -> None:
        self._key = key
        self._on_peek = on_peek  # called when vLLM reads the first request
        self._heap: list[tuple[Key, int, str]] = []  # stale entries are skipped when they reach the top
        self._live: dict[str, tuple[int, Request]] = {}  # request id -> its newest entry's number
        self._numbers = itertools.count()

    def add_request(self, request: Request) -> None:
        """Also moves a request that is in the queue to the place of its new key."""
        number = next(self._numbers)
        self._live[request.request_id] = (number, request)
        heapq.heappush(self._heap, (self._key(request), number, request.request_id))
        if len(self._heap) > 64 and len(self._heap) > 4 * len(self._live):
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)

    rekey = add_request
    prepend_request = add_request  # only the key decides the order

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.add_request(request)

    def peek_request(self) -> Request:
        self._on_peek()
        return self._head()

    def _head(self) -> Request:
        while self._heap and not self._is_live(self._heap[0]):
            heapq.heappop(self._heap)
        if not self._heap:
            raise IndexError("peek from an empty queue")
        return self._live[self._heap[0][2]][1]

    def head_key(self) -> Key:
        self._head()
        return self._heap[0][0]

    def pop_request(self) -> Request:
        request = self._head()
        heapq.heappop(self._heap)
        del self._live[request.request_id]
        return request

    def remove_request(self, request: Request) -> None:
        if self._live.pop(request.request_id, None) is None:
            raise ValueError(f"request {request.request_id} is not in the queue")

    def remove_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._live.pop(request.request_id, None)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._live

    def __bool__(self) -> bool:
        """Whether a request may be scheduled: only len() counts those that are held or wait for input."""
        return bool(self._live) and not self.head_key()[0]

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Request]:
        return (self._live[entry[2]][1] for entry in sorted(filter(self._is_live, self._heap)))

    def __getitem__(self, index: int) -> Request:
        return list(self)[index]

    def _is_live(self, entry: tuple[Key, int, str]) -> bool:
        newest = self._live.get(entry[2])
        return newest is not None and newest[0] == entry[1]
