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
from typing import Any

from connectors.lmcache_mp.tracker import Tracker

LEASE_SHARE = 1 / 3


class ReadLeases:
    """Ages and ends the leases that trackers have."""

    def __init__(self, adapter: Any, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._adapter, self._clock = adapter, clock
        self._usable_s = lease_s * LEASE_SHARE

    def on_lookup(self, tracker: Tracker) -> None:
        """Its lookup was submitted, now or before."""
        if tracker.asked_s is None:
            tracker.asked_s = self._clock()

    def renew_if_old(self, tracker: Tracker) -> bool:
        """Return an old lease to the server. True: it is being returned, so the lookup must wait."""
        if tracker.returning is None:
            # a running lookup is not changed
            found = self._adapter._finished_lookup_results.get(tracker.request_id, 0)
            is_old = tracker.asked_s is not None and self._clock() - tracker.asked_s > self._usable_s
            if found and is_old:
                self.release(tracker)
            return bool(found and is_old)
        sent_s, replies = tracker.returning
        # the server may never acknowledge it, for example since it was started again
        is_lost = not self._adapter.is_healthy or self._clock() - sent_s > self._adapter._mq_timeout
        if is_lost or all(reply.query() for reply in replies):
            tracker.returning = None
        return tracker.returning is not None

    def release(self, tracker: Tracker) -> None:
        """Unlock what its lookup found, unless it found nothing or was used.

        What a lookup without an answer finds stays locked until its lease ends: the server executes messages
        in any order, and would unlock nothing before it has looked.
        """
        hit_tokens = self._adapter._finished_lookup_results.get(tracker.request_id, 0)
        asked_s, tracker.asked_s = tracker.asked_s, None
        if asked_s is None or not hit_tokens or not self._adapter.is_healthy:
            return
        key = self._adapter._create_key(
            tracker.get_token_ids(),
            0,
            hit_tokens,
            request_id=tracker.request_id,
            cache_salt=tracker.cache_salt,
            request_configs=tracker.request_configs,
        ).no_worker_id_version()
        replies = [
            c.free_lookup_locks(key, self._adapter.tp_size) for c in self._adapter.req_clients.values()
        ]
        tracker.returning = self._clock(), replies
        self._adapter.cleanup_lookup_result(tracker.request_id)
