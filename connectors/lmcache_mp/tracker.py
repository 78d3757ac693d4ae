"""LMCache's record of a request, with what is decided while the request waits.

    asked_s is None, loads is None   no lookup yet: the tiers' mirror tells whether one is needed
    asked_s is set                   LMCache's answer is awaited or its find is locked, until the load begins
    returning is set                 what an old lookup had found is being unlocked; then all begins anew
    loads is False                   its tokens are computed, whatever the tiers hold

LMCache goes by three counts. It sets them at a lookup's answer; here they are corrected where it does not:

    num_vllm_hit_tokens      on the GPU before the request ran } the larger one counts as computed, with all
    num_lmcache_hit_tokens   brought by its load               } that was scheduled, and is stored up to there
    num_stored_tokens        in the tiers, so it is not stored again
"""

from __future__ import annotations

from typing import Any

from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestState, LMCacheMPRequestTracker
from vllm.v1.request import Request

from continuum_lmcache.reload.tier_store import TierHit


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

    def after_more_input(self, computed_tokens: int) -> None:
        """A streaming session goes on. LMCache 0.5.6 counts rejected drafts as computed, and would store
        that much of the new input too early."""
        if self.num_scheduled_tokens:  # of an earlier input
            hits = max(self.num_vllm_hit_tokens, self.num_lmcache_hit_tokens)
            self.num_scheduled_tokens: int = computed_tokens - hits
