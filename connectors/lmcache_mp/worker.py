"""The worker's side with an LMCache MP server: times its transfers, and does not hang with a dead server.

On a CPU the worker itself waits for the server in each load and store, by default for 300 s, and a store
that times out kills the engine (worker_transfer.py, EngineDrivenTransferContext.submit_store). Here it
waits for STALL_S, once. Then the server counts as dead until LMCache's own heartbeat finds it again.

On a GPU the server itself reads and writes vLLM's blocks, some time after the request. A server that does not
answer may be busy and do so later, so blocks are not freed before one of

    the server's answer | its connection was closed | mq_timeout has passed

mq_timeout counts from the request if the server obeys the deadline (server/deadline.py), else from its
missed heartbeat. LMCache itself gives up all transfers at once; later writes then hit other requests.

Used members of LMCacheMPWorkerAdapter, as of LMCache 0.5.6: submit_store_request and submit_retrieve_request
(wrapped on the instance), store_futures, retrieve_futures, req_client, and the private `_health_event` and
`_mq_timeout`. Of its ZMQ client: `_message_queue_client.cancel_streams`, which its loop calls when the
connection is closed (transport/zmq_impl/mq.py:272), wrapped on the instance.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from lmcache.v1.multiprocess.futures import MessagingFuture
from lmcache.v1.multiprocess.transfer_context.worker_transfer import EngineDrivenTransferContext

from connectors.lmcache_mp.load_join import MpReport
from connectors.lmcache_mp.server.deadline import with_deadline
from connectors.lmcache_mp.tracker import LEASE_SHARE
from connectors.lmcache_mp.transfer_watch import Transfer, TransferWatch, WatchedFuture
from continuum_lmcache.reload.tier_store import KVTransfer
from continuum_lmcache.types import Tier

STALL_S = 5.0  # a live server answers in milliseconds
HEALTHY = threading.Event()
HEALTHY.set()


class MpWorkerSide:
    """Wraps one rank's adapter. Rank 0 reports its times; `lease_s` is the server's read lease."""

    def __init__(
        self,
        adapter: Any,
        rank: int,
        kv_bytes_per_token: int,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
        has_one_clock: bool = False,
    ) -> None:
        self._adapter, self._rank, self._clock = adapter, rank, clock
        self._has_one_clock = has_one_clock  # with the server, which begins no late transfer
        self._kv_bytes_per_token = kv_bytes_per_token
        self._longest_load_s = lease_s * LEASE_SHARE
        self._connection_lost = threading.Event()  # so the server that got the requests is gone
        self._storing: set[str] = set()  # requests that LMCache reports as stored while a store still runs
        self.watch = TransferWatch(clock)
        self._fresh: list[KVTransfer] = []  # loads since the last report
        self._store, adapter.submit_store_request = adapter.submit_store_request, self.store
        self._retrieve, adapter.submit_retrieve_request = adapter.submit_retrieve_request, self.retrieve
        if queue := getattr(adapter.req_client, "_message_queue_client", None):  # else gRPC
            self._cancel_streams, queue.cancel_streams = queue.cancel_streams, self.connection_closed

    def store(self, request_id: str, op: Any, event: Any, *args: Any, **kwargs: Any) -> None:
        """submit_store_request. If the server does not answer, the store is lost, not the engine."""
        start_s = self._prepare_submit()
        earlier = self._adapter.store_futures.get(request_id)
        try:
            self._store(request_id, op, event, *args, **self._with_deadline(start_s, kwargs))
        except TimeoutError:
            self.mark_server_down()
            return
        future = self._adapter.store_futures.get(request_id)
        if future is not None and future is not earlier:  # else LMCache has left the store out
            watched = self._adapter.store_futures[request_id] = WatchedFuture(future)
            self._track(request_id, False, op.end - op.start, start_s, watched, event)

    def retrieve(self, request_id: str, op: Any, event: Any, *args: Any, **kwargs: Any) -> None:
        """submit_retrieve_request. If it fails, vLLM computes the tokens.

        vLLM's own hits are excluded: LMCache does not load them, but would report their shared blocks.
        """
        start_s = self._prepare_submit()
        self._retrieve(request_id, op, event, *args, **self._with_deadline(start_s, kwargs))
        # of blocks at the beginning of a chunk
        gpu_blocks = op.skip_first_n_tokens * len(op.flat_block_ids) // (op.end - op.start)
        if running := self._adapter.retrieve_futures.get(request_id):
            watched = WatchedFuture(running[0])
            self._adapter.retrieve_futures[request_id] = (watched, running[1][gpu_blocks:])
            tokens = op.end - op.start - op.skip_first_n_tokens
            self._track(request_id, True, tokens, start_s, watched, event)
        else:
            self._adapter.error_block_ids.difference_update(op.flat_block_ids[:gpu_blocks])

    def mark_server_down(self) -> None:
        """Submit nothing until LMCache's heartbeat finds the server again and registers with it."""
        self._adapter._health_event.clear()

    def await_stores(self) -> None:
        """Wait for the running stores: the blocks that they read are about to be overwritten.

        Does not wait for a server that is gone. For one that does not answer it waits mq_timeout in all,
        where LMCache waits that long for each store.
        """
        end_s = self._clock() + self._adapter._mq_timeout
        for transfer in [transfer for transfer in self.watch.running if not transfer.is_load]:
            while not transfer.future.query():
                if self._connection_lost.is_set() or self._clock() > end_s:
                    self.mark_server_down()  # then the adapter waits for nothing
                    return
                transfer.future.wait(0.01)

    def connection_closed(self) -> None:
        """LMCache's client lost its connection. Called by a thread of that client."""
        self._connection_lost.set()
        self._cancel_streams()

    def poll(self) -> None:
        """Note which transfers have ended. Called before the adapter's get_finished, which forgets them."""
        self._take_ended()
        self._give_up()

    def stored(self, reported: set[str]) -> set[str]:
        """Of the requests reported as stored, those without a running store.

        LMCache keeps one store per request, the last, and reports the request as stored once any store
        has ended (LMCache/LMCache#5062). vLLM would then free blocks that are still read.
        """
        reported |= self._storing
        self._storing = reported & {move.request_id for move in self.watch.running if not move.is_load}
        return reported - self._storing

    @contextlib.contextmanager
    def without_giving_up(self) -> Iterator[None]:
        """Within it the adapter sees the server as healthy, so its get_finished gives up no transfer.

        LMCache's heartbeat has the event itself, and continues.
        """
        adapter = self._adapter
        health, adapter._health_event = adapter._health_event, HEALTHY
        try:
            yield
        finally:
            adapter._health_event = health

    def _give_up(self) -> None:
        """End the transfers that no server will execute, as failed: vLLM computes their tokens."""
        now_s, connection_lost = self._clock(), self._connection_lost.is_set()
        self._connection_lost.clear()
        if connection_lost:
            self.mark_server_down()  # another server may answer the next ping, and does not know this worker
        for transfer in self.watch.running:
            if not self._adapter.is_healthy:  # it may not answer now, and execute the transfer later
                transfer.give_up_s = min(transfer.give_up_s, now_s + self._adapter._mq_timeout)
            if connection_lost or now_s >= transfer.give_up_s:
                self._fail(transfer)

    def report(self) -> MpReport | None:
        """The loads that ended since the last report, from rank 0."""
        fresh, self._fresh = self._fresh, []
        return MpReport(fresh) if self._rank == 0 and fresh else None

    def _prepare_submit(self) -> float:
        """Limit the adapter's own wait, and return the time. Each registration makes a new context.

        Transfers requested from an earlier server are given up first: the next transfer uses another
        connection than the closed one.
        """
        self._give_up()
        context = self._adapter.transfer_ctx
        if self._adapter.is_healthy and isinstance(context, EngineDrivenTransferContext):
            context.engine_driven_context.mq_timeout = STALL_S
        return self._clock()

    def _with_deadline(self, start_s: float, kwargs: dict[str, Any]) -> dict[str, Any]:
        if not self._has_one_clock:
            return kwargs
        configs = with_deadline(kwargs.get("request_configs"), start_s + self._adapter._mq_timeout)
        return {**kwargs, "request_configs": configs}

    def _track(
        self, request_id: str, is_load: bool, tokens: int, start_s: float, future: WatchedFuture, event: Any
    ) -> None:
        end_s = start_s + self._adapter._mq_timeout if self._has_one_clock else math.inf
        self.watch.add(Transfer(request_id, is_load, tokens, start_s, future, event, end_s))
        if future.query():  # on a CPU it has ended already: take the time now, not at the next poll
            self._take_ended()

    def _take_ended(self) -> None:
        ended = self.watch.poll()
        self.watch.remove(ended)
        for load in [transfer for transfer in ended if transfer.is_load]:
            if self._clock() - load.submitted_s > self._longest_load_s:
                self._fail(load)  # the lease may have ended during the load
            elif load.future.result(timeout=0) and load.duration_s:
                sizes = load.tokens, load.tokens * self._kv_bytes_per_token
                self._fresh.append(KVTransfer(Tier.DRAM, *sizes, load.duration_s, load.request_id))

    def _fail(self, transfer: Transfer) -> None:
        """Replace a failed transfer's future by a failed one, which the adapter reports."""
        self.watch.remove([transfer])
        failed: MessagingFuture[bool] = MessagingFuture()
        failed.set_result(False)
        stores, loads = self._adapter.store_futures, self._adapter.retrieve_futures
        if transfer.is_load and transfer.request_id in loads:  # else it ended since and was reported
            loads[transfer.request_id] = (failed, loads[transfer.request_id][1])
        elif stores.get(transfer.request_id) is transfer.future:
            stores[transfer.request_id] = failed
