"""LMCache's MP server in this process, and vLLM's two sides of its connector around it, without vLLM.

The server is the real one, sockets, shared memory and files included; so are LMCache's adapters and our
parts on either side of them. Only vLLM's own steps are played by `run`. It is a store under test for the
contract suite: eviction, which the server does once a second, is done in `settle`, by LMCache's policies.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import zmq
from lmcache.integration.vllm.vllm_multi_process_adapter import (
    LMCacheMPSchedulerAdapter,
    LMCacheMPWorkerAdapter,
    LoadStoreOp,
    ParallelStrategy,
)
from lmcache.v1.multiprocess.futures import MessagingFuture
from lmcache.v1.multiprocess.group_view import EngineGroupInfo
from lmcache.v1.multiprocess.token_hasher import TokenHasher
from lmcache.v1.multiprocess.transport.zmq_impl.mq import ClientPollingLoop
from lmcache_mp_server import CHUNK, MODEL, MpServer, PatientWorker, patient
from waiting import wait_for

from connectors.lmcache_mp.load_join import MpReport
from connectors.lmcache_mp.startup import caller, first_answer
from connectors.lmcache_mp.tier_mirror import MpTiers, TierPoller
from connectors.lmcache_mp.wire import ChangesRequest
from continuum_lmcache.reload.tier_store import KVTransfer, TierHit
from continuum_lmcache.types import Tier

LAYERS, HEADS, HEAD = 2, 1, 8
SLOTS = 64  # vLLM blocks
ANSWER_S = 60.0  # for one answer; LMCache's 300 s, twenty times, are longer than a whole run may take
ENDING: list[threading.Thread] = []  # servers that are about to end; the session waits for them


class MpEngine:
    """One vLLM's scheduler and worker, joined to a server, stepped by hand.

    LMCache's heartbeats are off: their answers come at any time, and say that the server is up.
    """

    has_disk = True
    chunk_tokens = CHUNK
    bytes_per_token = LAYERS * 2 * HEADS * HEAD * 2

    def __init__(self, server: MpServer) -> None:
        self.server = server
        url, strategy = [f"tcp://127.0.0.1:{server.port}"], ParallelStrategy(False, 1, 0, 1, 1, 1)
        context = zmq.Context.instance()
        arguments = (context, MODEL, CHUNK, strategy)
        try:
            self.scheduler = LMCacheMPSchedulerAdapter(url, *arguments, mq_timeout=ANSWER_S)
        except ConnectionError:  # seen once, for every test of a file; all clients share a thread
            faulthandler.dump_traceback(sys.__stderr__)
            ClientPollingLoop._instance = None
            self.scheduler = LMCacheMPSchedulerAdapter(url, *arguments, mq_timeout=ANSWER_S)
        self.adapter = LMCacheMPWorkerAdapter(url[0], *arguments, mq_timeout=ANSWER_S)
        self.kv = {
            f"layer.{i}": torch.zeros(SLOTS, HEADS, CHUNK, 2 * HEAD, dtype=torch.bfloat16)
            for i in range(LAYERS)
        }
        groups = [EngineGroupInfo(0, tuple(range(LAYERS)), CHUNK)]
        self.adapter.register_kv_caches(self.kv, groups, {"kv_layout": "HND"})
        (client,) = self.scheduler.req_clients.values()
        self._ends: list[MessagingFuture[None]] = []  # the server's answers to ends of sessions
        end_session = client.end_session
        client.end_session = lambda request_id: self._ends.append(end_session(request_id))
        for adapter in (self.scheduler, self.adapter):
            adapter._ensure_heartbeat_started = lambda: None
        self.follower = TierPoller(
            patient(caller(client)), ChangesRequest(MODEL, 1, scheduler=uuid.uuid4().hex), clock=Clock()
        )
        reply = first_answer(self.follower)
        hasher = TokenHasher(CHUNK, reply.hash_algorithm)
        self.tiers = MpTiers(self.follower, hasher, self.bytes_per_token)
        self.worker = PatientWorker(self.adapter, 0, self.bytes_per_token, reply.read_lease_s)
        self._ids = (f"{id(self):x}-{number}" for number in itertools.count())
        self._transfers: list[KVTransfer] = []

    # ---- vLLM's calls

    def lookup(self, request_id: str, token_ids: Sequence[int]) -> int:
        """How many tokens the server found, locked and made ready."""
        self.scheduler.maybe_submit_lookup_request(request_id, list(token_ids))
        found: list[int] = []

        def answered() -> bool:
            hit = self.scheduler.check_lookup_result(request_id)
            found.extend([hit] if hit is not None else [])
            return bool(found)

        wait_for(answered)
        self.scheduler.cleanup_lookup_result(request_id)
        return found[0]

    def load(self, request_id: str, token_ids: Sequence[int], tokens: int) -> int:
        """Load the first `tokens` into zeroed blocks; returns how many were loaded, all of them right."""
        for layer in self.kv.values():
            layer.zero_()
        if tokens:
            self.adapter.submit_retrieve_request(request_id, op(token_ids, 0, tokens), None)
            self.worker.poll()
            self.adapter.get_finished(set())
        failed = self.adapter.get_block_ids_with_load_errors()
        came = 0 if failed else tokens // CHUNK
        for layer in self.kv.values():
            assert torch.equal(layer[:came], content(token_ids)[:came]), "other KV than this prompt's"
        return came * CHUNK

    def store(self, request_id: str, token_ids: Sequence[int], skip_tokens: int) -> None:
        end = len(token_ids) // CHUNK * CHUNK
        for layer in self.kv.values():
            layer[: end // CHUNK] = content(token_ids)
        if end > skip_tokens:
            self.adapter.submit_store_request(request_id, op(token_ids, skip_tokens, end), None)
        self.worker.poll()
        self.adapter.get_finished({request_id})
        self.scheduler.end_session(request_id)

    # ---- a store under test

    def run(self, token_ids: Sequence[int]) -> TierHit:
        request_id = next(self._ids)
        self._take()
        hit_tokens = self.lookup(request_id, token_ids)
        came = self.load(request_id, token_ids, hit_tokens)
        assert came == hit_tokens
        loads: list[KVTransfer] = []
        if hit_tokens:
            wait_for(lambda: loads.extend(self._take()) or loads)
        self.store(request_id, token_ids, came)
        by_tier = {load.tier: load.tokens for load in loads}
        assert sum(by_tier.values()) == came
        return TierHit(by_tier.get(Tier.DRAM, 0), by_tier.get(Tier.SSD, 0))

    def locate(self, token_ids: Sequence[int]) -> TierHit:
        return self.tiers.locate(token_ids, "")

    def transfers(self) -> list[KVTransfer]:
        self._take()
        done, self._transfers = self._transfers, []
        return done

    def settle(self) -> None:
        wait_for(lambda: all(end.query() for end in self._ends))
        self._ends.clear()
        self.server.settle()
        self.follower.poll()

    def forget(self, token_ids: Sequence[int], kept_tokens: int = 0) -> None:
        self.settle()
        self.server.forget(token_ids, kept_tokens)
        self.follower.poll()

    def check(self) -> None:
        """The mirror equals the server, and no lock is left."""
        self.settle()
        held = tuple({key.chunk_hash for key in tier} for tier in self.server.held())
        assert self.follower.mirror._stored == held
        wait_for(lambda: not any(entry.read_lock.is_locked() for entry in self.server.l1._objects.values()))

    def close(self) -> None:
        self.adapter.shutdown()
        self.scheduler.shutdown()

    def _take(self) -> list[KVTransfer]:
        """The transfers timed since the last call, joined with the server's lookups."""
        self.follower.poll()
        self.tiers.apply_report(self.worker.report() or MpReport([]))
        fresh = self.tiers.transfers()
        self._transfers += fresh
        return fresh


class Clock:
    """Time as a value."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class MpRig(MpEngine):
    """One server and one engine."""

    def __init__(
        self, directory: Path, dram_chunks: int, ssd_chunks: int, *more: str, **options: Any
    ) -> None:
        super().__init__(MpServer(directory, dram_chunks, ssd_chunks, *more, **options))

    def close(self) -> None:
        """The server's loops check once a second whether they should end; this does not wait for them."""
        super().close()
        ENDING.append(threading.Thread(target=self.server.close))
        ENDING[-1].start()


def op(token_ids: Sequence[int], start: int, end: int) -> LoadStoreOp:
    """A move of [start, end); block i of the prompt lies in vLLM's block i."""
    return LoadStoreOp(list(token_ids), [list(range(start // CHUNK, end // CHUNK))], start, end)


@contextlib.contextmanager
def mp_rigs(directory: Path) -> Iterator[Callable[..., MpRig]]:
    """Makes rigs; each is checked and closed in the end."""
    made: list[MpRig] = []

    def make(dram_chunks: int = 16, ssd_chunks: int = 64, *more: str, **options: Any) -> MpRig:
        made.append(MpRig(directory / str(len(made)), dram_chunks, ssd_chunks, *more, **options))
        return made[-1]

    yield make
    for each in made:
        each.check()
        each.close()


def content(tokens: Sequence[int]) -> torch.Tensor:
    """KV with known content: every value of block i is its first token."""
    heads = torch.tensor(tokens[: len(tokens) // CHUNK * CHUNK : CHUNK], dtype=torch.bfloat16)
    return heads.view(-1, 1, 1, 1).expand(-1, HEADS, CHUNK, 2 * HEAD)


def prompt(program: int, chunks: int) -> list[int]:
    return [1 + program * 20 + i // CHUNK for i in range(chunks * CHUNK)]
