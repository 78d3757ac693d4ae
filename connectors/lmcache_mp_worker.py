"""The worker's half with an LMCache MP server: times its moves, and does not hang with a dead server.

On a CPU the worker itself waits for the server in each load and store, by default for 300 s, and a store
that times out kills the engine (worker_transfer.py, EngineDrivenTransferContext.submit_store). Here it
waits for STALL_S, once: then the server counts as dead until LMCache's own heartbeat finds it again.

Seams of LMCacheMPWorkerAdapter, read in LMCache 0.5.6: submit_store_request and submit_retrieve_request
(wrapped on the instance), store_futures, retrieve_futures, and the private `_health_event`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lmcache.v1.multiprocess.futures import MessagingFuture
from lmcache.v1.multiprocess.transfer_context.worker_transfer import EngineDrivenTransferContext

from connectors.lmcache_mp_leases import LEASE_SHARE
from connectors.lmcache_mp_loads import MpReport, TimedLoad
from continuum_lmcache.tiers import Transfer
from continuum_lmcache.types import Tier

STALL_S = 5.0  # a live server answers in milliseconds


@dataclass(slots=True)
class Move:
    """One load or store under way."""

    request_id: str
    is_load: bool
    tokens: int
    start_s: float
    future: MessagingFuture[bool]


class MpWorkerSide:
    """Wraps one rank's adapter. `rank` 0 reports what it timed; `lease_s` is the server's read lease."""

    def __init__(
        self,
        adapter: Any,
        rank: int,
        kv_bytes_per_token: int,
        lease_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._adapter, self._rank, self._clock = adapter, rank, clock
        self._kv_bytes_per_token = kv_bytes_per_token
        self._longest_load_s = lease_s * LEASE_SHARE
        self._running: list[Move] = []
        self._fresh = MpReport()
        self._store, adapter.submit_store_request = adapter.submit_store_request, self.store
        self._retrieve, adapter.submit_retrieve_request = adapter.submit_retrieve_request, self.retrieve

    def store(self, request_id: str, op: Any, *args: Any, **kwargs: Any) -> None:
        """submit_store_request. A server that does not answer costs the store, not the engine."""
        start_s = self._ready()
        try:
            self._store(request_id, op, *args, **kwargs)
        except TimeoutError:
            self.server_is_down()
            return
        if future := self._adapter.store_futures.get(request_id):
            self._began(Move(request_id, False, op.end - op.start, start_s, future))

    def retrieve(self, request_id: str, op: Any, *args: Any, **kwargs: Any) -> None:
        """submit_retrieve_request. If it fails, vLLM computes the tokens."""
        start_s = self._ready()
        self._retrieve(request_id, op, *args, **kwargs)
        if running := self._adapter.retrieve_futures.get(request_id):
            tokens = op.end - op.start - op.skip_first_n_tokens
            self._began(Move(request_id, True, tokens, start_s, running[0]))

    def server_is_down(self) -> None:
        """Submit nothing more until LMCache's heartbeat finds the server again and registers with it."""
        self._adapter._health_event.clear()

    def poll(self) -> None:
        """Note which moves have ended. Called before the adapter's get_finished, which forgets them."""
        if not self._adapter.is_healthy:
            self._running.clear()  # the adapter gives them up
        for move in [move for move in self._running if move.future.query()]:
            self._running.remove(move)
            self._ended(move)

    def report(self) -> MpReport | None:
        """What ended since the last report, from rank 0."""
        fresh, self._fresh = self._fresh, MpReport()
        return fresh if self._rank == 0 and (fresh.loads or fresh.stores) else None

    def _ready(self) -> float:
        """Bound the adapter's own wait; the time is now. A new context comes with every registration."""
        context = self._adapter.transfer_ctx
        if self._adapter.is_healthy and isinstance(context, EngineDrivenTransferContext):
            context.engine_driven_context.mq_timeout = STALL_S
        return self._clock()

    def _began(self, move: Move) -> None:
        self._running.append(move)
        if move.future.query():  # on a CPU it has ended already: its time is now, not at the next poll
            self._running.pop()
            self._ended(move)

    def _ended(self, move: Move) -> None:
        duration_s = self._clock() - move.start_s
        if move.is_load and duration_s > self._longest_load_s:
            self._distrust(move.request_id)
        elif move.future.result(timeout=0):
            size_bytes = move.tokens * self._kv_bytes_per_token
            if move.is_load:
                self._fresh.loads.append(TimedLoad(move.request_id, move.tokens, size_bytes, duration_s))
            else:
                stored = Transfer(Tier.DRAM, "store", move.tokens, size_bytes, duration_s, in_step=False)
                self._fresh.stores.append(stored)

    def _distrust(self, request_id: str) -> None:
        """The lease may have ended while it was read: report it failed, so that vLLM computes it."""
        failed: MessagingFuture[bool] = MessagingFuture()
        failed.set_result(False)
        _, block_ids = self._adapter.retrieve_futures[request_id]
        self._adapter.retrieve_futures[request_id] = (failed, block_ids)
