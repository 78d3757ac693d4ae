"""The stores that the contract suite runs on: one way to drive each, under one name.

A driver replaces the engine: it has GPU blocks with known content, runs turns on them, and finds what a load
really copied by reading the blocks, not by asking the store.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable, Sequence
from itertools import accumulate, count
from pathlib import Path
from types import SimpleNamespace
from typing import Protocol

import torch
from kv_oracle_native import BYTES_PER_TOKEN, CHUNK, NativeBench
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from connectors.fake.connector import FakeWorkerSide
from connectors.fake.scheduler_side import FakeMetadata, FakeSchedulerSide
from connectors.tier_model import GB, TierSpec, chunk_names
from continuum_lmcache.reload.tier_store import KVTransfer, Prefix, TierHit
from continuum_lmcache.types import Tier

MODEL = Path(__file__).resolve().parents[2] / ".work" / "tiny-model"  # made by the fixture `model`


class StoreUnderTest(Protocol):
    """A TierStore, and an engine to use it."""

    chunk_tokens: int
    bytes_per_token: int
    has_disk: bool

    def locate(self, token_ids: Sequence[int]) -> TierHit:
        """The store's `locate`, of a prompt with these tokens."""

    def transfers(self) -> list[KVTransfer]:
        """The store's `transfers`."""

    def run(self, token_ids: Sequence[int]) -> TierHit:
        """One turn with nothing on the GPU: load, compute the rest, store. Returns the loaded tokens."""

    def forget(self, token_ids: Sequence[int], kept_tokens: int = 0) -> None:
        """Drop the prompt's chunks, without those that begin in its first `kept_tokens`."""

    def settle(self) -> None:
        """Wait until no write is in flight."""

    def check(self) -> None:
        """Raise unless the store's tables balance."""

    def close(self) -> None:
        """Release everything."""


class FakeStore:
    """The fake connector's two halves around blocks whose content is a hash of their prefix."""

    chunk_tokens, block_tokens, bytes_per_token = 16, 4, 16  # two layers of 8 bytes a token
    blocks, has_disk = 1024, True

    def __init__(self, dram_chunks: int, ssd_chunks: int, **settings: float) -> None:
        self.now_s = 0.0
        chunk_gb = self.chunk_tokens * self.bytes_per_token / GB
        config = TierSpec(
            dram_gb=dram_chunks * chunk_gb,
            ssd_gb=ssd_chunks * chunk_gb,
            chunk_tokens=self.chunk_tokens,
            **settings,  # type: ignore[arg-type]
        )
        self.scheduler_side = FakeSchedulerSide(
            config, self.bytes_per_token, self.block_tokens, lambda: self.now_s
        )
        self.worker = FakeWorkerSide()
        self.kv = {name: torch.zeros(self.blocks, self.block_tokens, dtype=torch.int64) for name in "ab"}
        self.worker.register(self.kv, self.blocks)
        self.ids = map(str, count())

    def run(self, token_ids: Sequence[int], gpu_tokens: int = 0) -> TierHit:
        request = self._request(token_ids)
        loads = self.scheduler_side.offered_tokens(request, gpu_tokens)
        at = list(range(-(-len(token_ids) // self.block_tokens)))
        content = self._content(token_ids)
        self._fill(content, 0, 0)
        self._fill(content, 0, gpu_tokens)
        self.scheduler_side.on_alloc(request, at, loads)
        request.num_computed_tokens = gpu_tokens + loads
        meta = self._step(request, at, len(token_ids) - request.num_computed_tokens)
        self.worker.load(meta.loads)
        brought = self._brought(meta, content)
        self._fill(content, gpu_tokens + loads, len(token_ids))
        self.worker.store(meta.stores)
        self.worker.drop(meta.drops)
        self.scheduler_side.finished(request.request_id)
        return brought

    def locate(self, token_ids: Sequence[int]) -> TierHit:
        return self.scheduler_side.store.locate(self.now_s, chunk_names(token_ids, self.chunk_tokens))

    def settle(self) -> None:
        self.now_s += 1e9
        self.scheduler_side.store.finish_writes(self.now_s)

    def forget(self, token_ids: Sequence[int], kept_tokens: int = 0) -> None:
        names = chunk_names(token_ids, self.chunk_tokens)
        self.scheduler_side.store.forget(names[-(-kept_tokens // self.chunk_tokens) :])

    def transfers(self) -> list[KVTransfer]:
        return self.scheduler_side.store.transfers()

    def check(self) -> None:
        self.scheduler_side.store.check()
        held = {
            *self.scheduler_side.store.dram.names,
            *self.scheduler_side.store.ssd.names,
            *self.scheduler_side.store.pending,
        }
        missing = held - self.worker.chunks.keys()
        assert not missing, f"{len(missing)} chunks are in the index, but their bytes are gone"
        kept = len(self.worker.chunks)
        assert kept <= len(held) + len(self.scheduler_side.store._evicted), (
            f"bytes of {kept} chunks for {len(held)}"
        )

    def close(self) -> None:
        pass

    def _request(self, token_ids: Sequence[int]) -> SimpleNamespace:
        return SimpleNamespace(
            request_id=next(self.ids),
            all_token_ids=token_ids,
            num_tokens=len(token_ids),
            num_prompt_tokens=len(token_ids),
            num_computed_tokens=0,
            cache_salt=None,
            lora_request=None,
            mm_features=[],
        )

    def _step(self, request: SimpleNamespace, at: list[int], scheduled_tokens: int) -> FakeMetadata:
        new = SimpleNamespace(req_id=request.request_id, block_ids=(at,))
        nobody = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set())
        output = SimpleNamespace(
            num_scheduled_tokens={request.request_id: scheduled_tokens},
            scheduled_new_reqs=[new],
            scheduled_cached_reqs=nobody,
        )
        return self.scheduler_side.step(output)

    @staticmethod
    def _content(token_ids: Sequence[int]) -> list[int]:
        """The KV of each position: it depends on the whole prefix."""
        return list(accumulate(token_ids, lambda h, t: (h * 1_000_003 + t + 1) % (2**61 - 1), initial=7))[1:]

    def _fill(self, content: list[int], start: int, end: int) -> None:
        """Compute positions [start, end); with nothing to compute, wipe the blocks."""
        for sign, kv in zip((1, -1), self.kv.values(), strict=True):
            if start == end:
                kv.zero_()
            kv.view(-1)[start:end] = torch.tensor([sign * c for c in content[start:end]], dtype=torch.int64)

    def _brought(self, meta: FakeMetadata, content: list[int]) -> TierHit:
        """Tokens with the right content after the load, by tier."""
        tokens = dict.fromkeys(Tier, 0)
        for copy in (c for job in meta.loads for c in job.copies):
            for block in copy.block_ids:
                start = block * self.block_tokens
                want = content[start : start + self.block_tokens]
                signs = zip((1, -1), self.kv.values(), strict=True)
                right = all(kv[block].tolist() == [sign * c for c in want] for sign, kv in signs)
                tokens[copy.tier] += self.block_tokens * right
        return TierHit(tokens[Tier.DRAM], tokens[Tier.SSD])


class NativeStore:
    """vLLM's own offloading, driven by vLLM's own scheduler on the oracle's GPU. It has no disk."""

    chunk_tokens, bytes_per_token, has_disk = CHUNK, BYTES_PER_TOKEN, False

    def __init__(self, dram_chunks: int, ssd_chunks: int) -> None:  # noqa: ARG002
        self.bench = NativeBench(Scheduler, MODEL, True, blocks=60, chunks=dram_chunks, log_stats=False)
        self.connector = self.bench.scheduler.connector

    def run(self, token_ids: Sequence[int]) -> TierHit:
        self.bench.scheduler.reset_prefix_cache()
        self.bench.loaded_tokens = 0
        self.bench.turn(None, list(token_ids))
        return TierHit(self.bench.loaded_tokens, 0)

    def locate(self, token_ids: Sequence[int]) -> TierHit:
        return self.connector.locate(Prefix(token_ids, self._hashes(token_ids)))

    def forget(self, token_ids: Sequence[int], kept_tokens: int = 0) -> None:
        """As an eviction of these chunks: the manager has no call for it."""
        manager, first = self.connector.connector_scheduler.manager, -(-kept_tokens // CHUNK)
        for key in list(self.connector._keys(Prefix(token_ids, self._hashes(token_ids))))[first:]:
            if (held := manager._policy.get(key)) is not None:
                manager._policy.remove(key)
                manager._free_chunk(held)
                manager._num_evictable_cache_chunks -= 1

    def transfers(self) -> list[KVTransfer]:
        return self.connector.transfers()

    def settle(self) -> None:
        while self.connector.has_pending_push_work():
            self.bench.step()

    def check(self) -> None:
        assert self.bench.used_blocks == 0

    def close(self) -> None:
        self.bench.scheduler.shutdown()

    def _hashes(self, token_ids: Sequence[int]) -> Sequence[bytes]:
        return Request(
            "", list(token_ids), SamplingParams(), None, block_hasher=self.bench.hasher
        ).block_hashes


STORES: dict[str, Callable[[int, int], StoreUnderTest]] = {"fake": FakeStore, "native": NativeStore}
"""Drivers by name, made from the chunks that DRAM and the disk have room for."""

SERVER_MODULES = "lmcache.v1.multiprocess.protocols.server_module"  # LMCache 0.5.6 has them first

if importlib.util.find_spec("lmcache") and importlib.util.find_spec(SERVER_MODULES):
    os.environ["LMCACHE_TRACK_USAGE"] = "false"
    from lmcache_mp_rig import MpRig

    def mp_store(dram_chunks: int, ssd_chunks: int) -> StoreUnderTest:
        """LMCache's MP server, the real one, in this process."""
        return MpRig(Path(tempfile.mkdtemp()), dram_chunks, ssd_chunks)

    STORES["lmcache-mp"] = mp_store
