"""LMCache's own engine with this package's two halves around it, without vLLM: real backends, real files.

It also is a store under test for the contract suite: `run` is one turn as vLLM's connector drives it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lmcache.v1.cache_engine import LMCacheEngine, LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.token_database import ChunkedTokenDatabase
from waiting import wait_for

from connectors.lmcache.copies.on_cpu import BlockCopier
from connectors.lmcache.snapshot_rpc import addresses
from connectors.lmcache.tier_mirror import LMCacheTiers
from connectors.lmcache.worker import LMCacheWorkerSide
from continuum_lmcache.reload.tier_store import KVTransfer, TierHit
from continuum_lmcache.types import Tier

CHUNK = 16  # tokens, one vLLM block
LAYERS, HEADS, HEAD = 2, 1, 8
SLOTS = 64  # vLLM blocks
POOL_PAGE = 4096  # LMCache aligns a chunk in DRAM to this, and counts it so on disk
GIB = 1024**3


class Clock:
    """Time as a value."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Rig:
    """One worker and one scheduler's view, joined as vLLM joins them, but stepped by hand."""

    chunk_tokens = CHUNK
    bytes_per_token = LAYERS * 2 * HEADS * HEAD * 2

    def __init__(self, directory: Path, dram_chunks: int, disk_chunks: int) -> None:
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK,
            max_local_cpu_size=dram_chunks * POOL_PAGE / GIB,
            local_disk=str(directory),
            max_local_disk_size=disk_chunks * POOL_PAGE / GIB,
            pre_caching_hash_algorithm="sha256_cbor",
            extra_config={"disk_io_threads": 1},  # else chunks enter the disk's LRU in any order
        )
        shape = (LAYERS, 2, CHUNK, HEADS, HEAD)
        metadata = LMCacheMetadata("m", 1, 1, 0, 0, torch.bfloat16, shape, role="worker", chunk_size=CHUNK)
        database = LMCacheEngineBuilder._Create_token_database(config, metadata)
        self.engine = LMCacheEngine(
            config, metadata, database, BlockCopier(CHUNK), lambda it, _: it, lambda it, _: it
        )
        self.engine.post_init()
        self.kv = [torch.zeros(SLOTS, HEADS, CHUNK, 2 * HEAD, dtype=torch.bfloat16) for _ in range(LAYERS)]
        sockets = addresses(str(directory), 1)
        self.worker = LMCacheWorkerSide(self.engine, 0, sockets[0])
        self.database = ChunkedTokenDatabase(config, metadata)
        self.tiers = LMCacheTiers(self.database, CHUNK, sockets)
        backends = self.engine.storage_manager.storage_backends
        self.cpu, self.disk = backends["LocalCPUBackend"], backends["LocalDiskBackend"]
        self._ids = map(str, itertools.count())
        self._transfers: list[KVTransfer] = []
        self.lost: Counter[str] = Counter()

    # ---- vLLM's calls of the worker

    def store(self, tokens: Sequence[int], skip_chunks: int = 0, **more: Any) -> None:
        blocks = len(tokens) // CHUNK
        for layer in self.kv:
            layer[:blocks] = content(tokens)
        mask = torch.arange(len(tokens)) >= skip_chunks * CHUNK
        self.engine.store(list(tokens), mask=mask, offset=0, req_id="r", **self._where(tokens), **more)

    def load(self, tokens: Sequence[int]) -> int:
        """Load the stored chunks into zeroed blocks; return how many tokens came, all of them right."""
        for layer in self.kv:
            layer.zero_()
        found = self.engine.retrieve(list(tokens), req_id="r", **self._where(tokens))
        came = int(found.sum()) // CHUNK
        for layer in self.kv:
            assert torch.equal(layer[:came], content(tokens)[:came])
            assert not layer[came:].any()
        return came * CHUNK

    def step(self) -> None:
        """The end of a vLLM step: the worker reports, the scheduler applies it."""
        counts = self.worker.stats().data.items()
        self.lost.update({key.removeprefix("lost_chunks/"): n for key, n in counts if "lost_chunks" in key})
        if report := self.worker.report():
            self.tiers.apply_report(report)

    # ---- a store under test

    def run(self, token_ids: Sequence[int]) -> TierHit:
        request = next(self._ids)
        hit = self.engine.lookup(list(token_ids), lookup_id=request, pin=True)
        self.step()
        self._transfers += self.tiers.transfers()
        came = self.load(token_ids[:hit])
        self.engine.lookup_unpin(request)
        self.step()
        loads = self.tiers.transfers()
        self._transfers += loads
        self.store(token_ids, skip_chunks=came // CHUNK)
        by_tier = {load.tier: load.tokens for load in loads}
        assert sum(by_tier.values()) == came
        return TierHit(by_tier.get(Tier.DRAM, 0), by_tier.get(Tier.SSD, 0))

    def locate(self, token_ids: Sequence[int]) -> TierHit:
        return self.tiers.locate(token_ids)

    def transfers(self) -> list[KVTransfer]:
        found, self._transfers = self._transfers + self.tiers.transfers(), []
        return found

    def settle(self) -> None:
        """Wait until no disk write is in flight, then end a step."""
        wait_for(lambda: not self.disk.disk_worker.put_tasks)
        self.step()

    def forget(self, token_ids: Sequence[int], kept_tokens: int = 0) -> None:
        self.settle()
        chunks = {key.chunk_hash for key in self.keys(token_ids)[-(-kept_tokens // CHUNK) :]}
        with self.cpu.cpu_lock:
            evict(self.cpu, self.cpu.hot_cache, chunks)
        with self.disk.disk_lock:
            before = self.disk.usage
            evict(self.disk, self.disk.dict, chunks)
            self.disk.current_cache_size -= before - self.disk.usage  # the evicting side corrects the size
        self.step()

    def check(self) -> None:
        """The mirror equals LMCache, and nothing is left pinned."""
        self.settle()
        held = self.worker.snapshot()
        assert self.tiers._mirror._held == [(set(held.dram), set(held.ssd))]
        assert not any(chunk.is_pinned for chunk in self.cpu.hot_cache.values())

    def close(self) -> None:
        self.tiers.close()
        self.worker.close()
        self.engine.close()

    # ---- for tests that break things

    def keys(self, tokens: Sequence[int]) -> list:
        return [key for _, _, key in self.engine.token_database.process_tokens(list(tokens))]

    def file_of(self, tokens: Sequence[int], chunk: int) -> Path:
        return Path(self.disk._key_to_path(self.keys(tokens)[chunk]))

    def lose_files(self) -> None:
        for path in Path(self.disk.path).glob("*.pt"):
            path.unlink()

    def evict_from_dram(self) -> None:
        self.settle()
        self.cpu.clear()
        self.step()

    def _where(self, tokens: Sequence[int]) -> dict[str, object]:
        return {"kvcaches": self.kv, "slot_mapping": torch.arange(len(tokens))}


@contextlib.contextmanager
def rigs(directory: Path) -> Iterator[Callable[..., Rig]]:
    """Makes rigs; each is checked and closed in the end."""
    made: list[Rig] = []

    def make(dram_chunks: int = 16, disk_chunks: int = 64) -> Rig:
        made.append(Rig(directory / str(len(made)), dram_chunks, disk_chunks))
        return made[-1]

    yield make
    for each in made:
        each.check()
        each.close()


def evict(backend: Any, held: Any, chunks: Collection[int]) -> None:
    """Evict these as LMCache does. The caller holds the backend's lock."""
    for key in [key for key in held if key.chunk_hash in chunks]:
        backend.remove(key, force=False)
        backend.cache_policy.update_on_force_evict(key)


def content(tokens: Sequence[int]) -> torch.Tensor:
    """KV with known content: every value of block i is its first token."""
    heads = torch.tensor(tokens[: len(tokens) // CHUNK * CHUNK : CHUNK], dtype=torch.bfloat16)
    return heads.view(-1, 1, 1, 1).expand(-1, HEADS, CHUNK, 2 * HEAD)


def prompt(program: int, chunks: int) -> list[int]:
    return [1 + program * 20 + i // CHUNK for i in range(chunks * CHUNK)]
