"""Read leases of lookups: what a lookup found stays locked in L1 for the server's read TTL.

    lookup submitted                                                      the lease ends
    |-------- the first third: it may be used ------------------|----------------|
                                          the load may take a third of it, too

LMCache looks each request up once, when it first is at the head of the queue. If the request then waits for
memory longer than the lease, its KV may be evicted before or during the load. So an old lease is returned,
and the lookup is repeated. Nothing here waits.

Used members of LMCacheMPSchedulerAdapter, as of LMCache 0.5.6: req_clients, tp_size, cleanup_lookup_result,
and the private `_create_key`, `_finished_lookup_results` and `_mq_timeout`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

LEASE_SHARE = 1 / 3


class _Return(NamedTuple):
    sent_s: float
    replies: list[Any]  # the server's acknowledgements


class ReadLeases:
    """When each waiting request's lookup was submitted, and which leases are being returned."""

    def __init__(self, adapter: Any, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._adapter, self._clock = adapter, clock
        self._usable_s = lease_s * LEASE_SHARE
        self._submitted_s: dict[str, float] = {}  # by request: when its lookup was submitted
        self._returning: dict[str, _Return] = {}  # by request

    def on_lookup(self, request_id: str) -> None:
        """The request's lookup was submitted, now or before."""
        self._submitted_s.setdefault(request_id, self._clock())

    def has_lookup(self, request_id: str) -> bool:
        """Whether the request's lookup was submitted, and its lease is neither used nor returned."""
        return request_id in self._submitted_s

    def renew_if_old(self, request_id: str, tracker: Any) -> bool:
        """Return an old lease to the server. True: it is being returned, so the lookup must wait."""
        if request_id not in self._returning and self._is_old(request_id):
            self.release(request_id, tracker)
            return True
        returning = self._returning.get(request_id)
        if returning is not None and self._adapter.is_healthy and not self._is_returned(returning):
            return True
        self._returning.pop(request_id, None)
        return False

    def release(self, request_id: str, tracker: Any) -> None:
        """Unlock what the request's lookup found, unless it found nothing or was used.

        What a lookup without an answer finds stays locked until its lease ends: the server executes messages
        in any order, and would unlock nothing before it has looked.
        """
        hit_tokens = self._adapter._finished_lookup_results.get(request_id, 0)
        had_lookup = self._submitted_s.pop(request_id, None) is not None
        if not (had_lookup and hit_tokens and self._adapter.is_healthy):
            return
        key = self._adapter._create_key(
            tracker.get_token_ids(),
            0,
            hit_tokens,
            request_id=request_id,
            cache_salt=tracker.cache_salt,
            request_configs=tracker.request_configs,
        ).no_worker_id_version()
        replies = [
            c.free_lookup_locks(key, self._adapter.tp_size) for c in self._adapter.req_clients.values()
        ]
        self._returning[request_id] = _Return(self._clock(), replies)
        self._adapter.cleanup_lookup_result(request_id)

    def forget(self, request_id: str) -> None:
        """The request was admitted or has ended: its load ends the lease, or its release does."""
        self._submitted_s.pop(request_id, None)
        self._returning.pop(request_id, None)

    def _is_returned(self, returning: _Return) -> bool:
        """Whether the server has acknowledged it, or never will, for example since it was started again."""
        is_late = self._clock() - returning.sent_s > self._adapter._mq_timeout
        return is_late or all(reply.query() for reply in returning.replies)

    def _is_old(self, request_id: str) -> bool:
        """Whether the lookup has found something and its lease is old. A running lookup is not changed."""
        submitted_s = self._submitted_s.get(request_id)
        found = self._adapter._finished_lookup_results.get(request_id, 0)
        return submitted_s is not None and found > 0 and self._clock() - submitted_s > self._usable_s
