"""LMCache's record of a request, with what is decided while the request waits.

    asked_s is None, loads is None   no lookup yet: the tiers' mirror tells whether one is needed
    asked_s is set                   LMCache's answer is awaited or its find is locked, until the load begins
    returning is set                 what an old lookup had found is being unlocked; then all begins anew
    loads is False                   its tokens are computed, whatever the tiers hold

LMCache goes by three counts. It sets them at a lookup's answer; here they are corrected where it does not:

    num_vllm_hit_tokens      on the GPU before the request ran } the larger one counts as computed, with all
    num_lmcache_hit_tokens   brought by its load               } that was scheduled, and is stored up to there
    num_stored_tokens        in the tiers, so it is not stored again

A lookup is LMCache's lease: what it found stays locked in L1 for the server's read TTL.

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
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestState, LMCacheMPRequestTracker
from vllm.v1.request import Request

from continuum_lmcache.reload.tier_store import TierHit

LEASE_SHARE = 1 / 3


class Window(NamedTuple):
    """Layers that attend to so many tokens, and the blocks in which vLLM keeps and frees them."""

    tokens: int
    block_tokens: int


class Tracker(LMCacheMPRequestTracker):
    """One request's, from its arrival to its end; LMCache takes a new one after a preemption."""

    def __init__(self, request: Request, salt: str, weights: bytes) -> None:
        super().__init__(request)
        self.returning: tuple[float, list[Any]] | None = None  # since when, and the server's answers
        self.begin(salt, weights)

    def begin(self, salt: str, weights: bytes) -> None:
        """Forget what was found and decided: these weights compute its KV, which has this salt."""
        self.cache_salt, self.weights = salt, weights
        self.hit: TierHit | None = None  # at its first lookup, before L2's part was read into L1
        self.asked_s: float | None = None  # when its lookup was submitted, whose find is not used or returned
        self.loads: bool | None = None  # what the selector has chosen
        self.no_lookup: tuple[int, int] | None = None  # what the GPU had, and the mirror's number
        self.lookup_started_at = None
        self.computes(0, 0)

    @property
    def is_waiting(self) -> bool:
        """Whether it has no blocks yet."""
        return bool(self.state == LMCacheMPRequestState.PREFETCHING)

    def computes(self, gpu_tokens: int, stored_tokens: int) -> None:
        """Nothing is loaded. LMCache would keep the hits of an earlier lookup and store blocks too early."""
        self.num_vllm_hit_tokens, self.num_lmcache_hit_tokens = gpu_tokens, 0
        self.num_stored_tokens = stored_tokens

    def after_failed_load(self, computed_tokens: int, chunk_tokens: int) -> None:
        """It runs with this much, maybe less than its load was to bring. If vLLM has nothing of the prompt,
        LMCache itself restarts the count."""
        is_ready = self.state == LMCacheMPRequestState.READY
        if is_ready and computed_tokens < self.num_lmcache_hit_tokens - 1:
            self.computes(computed_tokens, computed_tokens // chunk_tokens * chunk_tokens)

    def without_windows(self, computed_tokens: int, windows: Iterable[Window], chunk_tokens: int) -> None:
        """Store no chunk of which vLLM has given back a window: it was computed before this step, as a
        prompt's start that the GPU had. LMCache 0.5.6 would store what others have written there since.

        Of a window that is shorter than a chunk LMCache stores the chunk's last tokens alone.
        """
        known_tokens = min(computed_tokens, len(self.all_token_ids) - 1)  # without the steps in flight
        for window in windows:
            given_back = (known_tokens - window.tokens + 1) // window.block_tokens * window.block_tokens
            first_token = given_back - max(0, chunk_tokens - window.tokens)
            first_chunk = -(-first_token // chunk_tokens)
            self.num_stored_tokens = max(self.num_stored_tokens, first_chunk * chunk_tokens)

    def after_more_input(self, computed_tokens: int) -> None:
        """A streaming session goes on. LMCache 0.5.6 counts rejected drafts as computed, and would store
        that much of the new input too early."""
        if self.num_scheduled_tokens:  # of an earlier input
            hits = max(self.num_vllm_hit_tokens, self.num_lmcache_hit_tokens)
            self.num_scheduled_tokens: int = computed_tokens - hits


class ReadLeases:
    """Ages and ends the leases that trackers have."""

    def __init__(self, adapter: Any, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._adapter, self._clock = adapter, clock
        self._usable_s = lease_s * LEASE_SHARE

    def on_lookup(self, tracker: Tracker) -> None:
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
