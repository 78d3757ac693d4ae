"""DRAM and disk below the GPU as LMCache keeps them: where each chunk of a prompt is, and when.

Names and places only, no bytes and no clock: `now_s` is an argument. A load returns, for chunks
0, 1, ... of a prompt:

    [0, dram)     the leading run found in DRAM
    [dram, ssd)   the leading run of the rest found on disk; read through DRAM, and kept there
    [ssd, n)      nothing: one chunk of the prefix is missing, or the tail is below a whole chunk

The rules are LMCache 0.5.6's (`v1/storage_backend/local_{cpu,disk}_backend.py`): every store goes to
both tiers, to the disk later; a tier evicts the least recently used chunk; a stored prompt's head is
its oldest chunk, and a hit is touched tail first, so that from then on the head is the youngest.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import takewhile
from typing import Any

from continuum_lmcache.config import require
from continuum_lmcache.errors import InvariantError
from continuum_lmcache.reload.tier_store import KVTransfer, TierHit
from continuum_lmcache.types import Tier

GB = 2**30  # as LMCache counts its `max_local_cpu_size`
TRANSFERS_KEPT = 4096  # the oldest are dropped when transfers() is not called

ChunkName = Hashable
"""Names one chunk and all tokens before it: equal names, equal KV."""

Namer = Callable[[Sequence[int], int, str, Sequence[Any]], list[ChunkName]]
"""(token ids, chunk tokens, salt, known names of the first chunks) -> names of all whole chunks."""


@dataclass(frozen=True, slots=True)
class TierSpec:
    """Sizes in GB of 2^30 bytes per rank, rates in 10^9 bytes/s, times in seconds.

    A size of 0 leaves a tier out. A missing rate takes no time. Raises ConfigError.
    """

    dram_gb: float = 1.0
    ssd_gb: float = 0.0
    chunk_tokens: int = 256
    load_gbps: float = math.inf  # DRAM to GPU
    ssd_load_gbps: float = math.inf
    ssd_store_gbps: float = math.inf
    load_latency_s: float = 0.0  # added to every load, whatever its size

    def __post_init__(self) -> None:
        for name in ("chunk_tokens", "load_gbps", "ssd_load_gbps", "ssd_store_gbps"):
            require(getattr(self, name) > 0, f"{name} of a tier", getattr(self, name), "more than 0")
        for name in ("dram_gb", "ssd_gb", "load_latency_s"):
            require(getattr(self, name) >= 0, f"{name} of a tier", getattr(self, name), "0 or more")


def chunk_names(
    token_ids: Sequence[int], chunk_tokens: int, salt: str = "", known: Sequence[Any] = ()
) -> list[ChunkName]:
    """Names of the whole chunks of `token_ids`, each a hash that includes the one before; `known` first."""
    names: list[ChunkName] = list(known)
    parent: bytes = known[-1] if known else salt.encode()
    for start in range(len(names) * chunk_tokens, len(token_ids) - chunk_tokens + 1, chunk_tokens):
        chunk = array("q", token_ids[start : start + chunk_tokens]).tobytes()
        parent = blake2b(parent + chunk, digest_size=16).digest()
        names.append(parent)
    return names


@dataclass(slots=True)
class LruTier:
    """One tier's chunks, next to be evicted first."""

    capacity: float  # in chunks
    names: OrderedDict[ChunkName, None] = field(default_factory=OrderedDict)
    reserved: int = 0  # places reserved for unfinished writes

    def make_room(self, keep: Collection[ChunkName] = ()) -> list[ChunkName] | None:
        """Evict until one more chunk fits, never from `keep`; None if that is impossible."""
        evicted = []
        while len(self.names) + self.reserved + 1 > self.capacity:
            victim = next((n for n in self.names if n not in keep), None)
            if victim is None:
                return None
            del self.names[victim]
            evicted.append(victim)
        return evicted

    def touch(self, hit: Sequence[ChunkName]) -> None:
        """Tail first, so that the head becomes the most recently used."""
        for name in reversed(hit):
            self.names.move_to_end(name)


@dataclass(slots=True)
class BandwidthLink:
    """One direction between two places, first in, first out. `gbps`: 10^9 bytes a second."""

    gbps: float = math.inf
    free_at_s: float = -math.inf

    def seconds(self, size_bytes: int) -> float:
        """How long `size_bytes` take without a wait for the link."""
        return size_bytes / (self.gbps * 1e9)

    def reserve(self, ready_s: float, size_bytes: int) -> float:
        """When bytes that are ready at `ready_s` have passed, after all earlier requests."""
        self.free_at_s = max(ready_s, self.free_at_s) + self.seconds(size_bytes)
        return self.free_at_s


@dataclass(frozen=True, slots=True)
class ActiveLoad:
    dram: Sequence[ChunkName]  # moved from there, without those the GPU had
    ssd: Sequence[ChunkName]
    done_s: float  # when the last byte is on the GPU


class TwoTierCache:
    def __init__(self, spec: TierSpec, bytes_per_token: int) -> None:
        self.spec, self.chunk_bytes = spec, spec.chunk_tokens * bytes_per_token
        self.dram = LruTier(spec.dram_gb * GB // self.chunk_bytes)
        self.ssd = LruTier(spec.ssd_gb * GB // self.chunk_bytes)
        self.pending: dict[ChunkName, float] = {}  # disk writes by when they end, soonest first
        self.to_gpu = BandwidthLink(spec.load_gbps)
        self.disk_read = BandwidthLink(spec.ssd_load_gbps)
        self.disk_write = BandwidthLink(spec.ssd_store_gbps)
        self._transfers: deque[KVTransfer] = deque(maxlen=TRANSFERS_KEPT)
        self._evicted: dict[ChunkName, None] = {}

    def locate(self, now_s: float, names: Sequence[ChunkName]) -> TierHit:
        """What a load of these chunks would return now. Unfinished writes do not count."""
        self.finish_writes(now_s)
        dram = _leading(names, self.dram.names)
        ssd = _leading(names[dram:], self.ssd.names)
        return TierHit(dram * self.spec.chunk_tokens, ssd * self.spec.chunk_tokens)

    def load(
        self, now_s: float, names: Sequence[ChunkName], gpu_tokens: int = 0, turn: str = ""
    ) -> ActiveLoad:
        """Load what `locate` counts, except whole chunks below `gpu_tokens`, which the GPU has.

        Touches all that was found. What comes from the disk stays in DRAM as far as there is room.
        """
        in_dram, on_disk = self.touch(now_s, names)
        skip = gpu_tokens // self.spec.chunk_tokens
        dram, ssd = in_dram[skip:], on_disk[max(0, skip - len(in_dram)) :]
        for name in ssd:
            if name not in self.dram.names and not self._admit(name, {*in_dram, *ssd}):
                break
        if not dram and not ssd:
            return ActiveLoad((), (), now_s)
        size_bytes, ssd_bytes = self._size(dram) + self._size(ssd), self._size(ssd)
        read_s = self.disk_read.reserve(now_s, ssd_bytes) if ssd else now_s
        done_s = self.to_gpu.reserve(read_s, size_bytes) + self.spec.load_latency_s
        ssd_s = self.disk_read.seconds(ssd_bytes) + self.to_gpu.seconds(ssd_bytes)
        for tier, chunks, took_s in (
            (Tier.DRAM, dram, self.to_gpu.seconds(self._size(dram))),
            (Tier.SSD, ssd, ssd_s),
        ):
            if chunks:
                tokens = len(chunks) * self.spec.chunk_tokens
                self._transfers.append(KVTransfer(tier, tokens, self._size(chunks), took_s, turn))
        return ActiveLoad(dram, ssd, done_s)

    def store(self, now_s: float, names: Sequence[ChunkName]) -> Sequence[ChunkName]:
        """Write chunks through: into DRAM now, to the disk after earlier writes. Skips stored chunks.

        Returns those that no tier had.
        """
        self.finish_writes(now_s)
        new = [n for n in names if not self.has(n)]
        keep = set(names)  # a prompt larger than DRAM is cut short; it does not evict its own chunks
        for name in names:
            if name not in self.dram.names:
                self._admit(name, keep)
        for name in names:
            self._write(now_s, name)
        return [n for n in new if self.has(n)]

    def finish_writes(self, now_s: float) -> None:
        due = takewhile(lambda name: self.pending[name] <= now_s, self.pending)
        for name in list(due):
            del self.pending[name]
            self.ssd.reserved -= 1
            self.ssd.names[name] = None

    def touch(
        self, now_s: float, names: Sequence[ChunkName]
    ) -> tuple[Sequence[ChunkName], Sequence[ChunkName]]:
        """Make what `locate` counts the most recently used, each tier's share tail first; returns both."""
        held, size = self.locate(now_s, names), self.spec.chunk_tokens
        dram, end = held.dram_tokens // size, held.tokens // size
        self.dram.touch(names[:dram])
        self.ssd.touch(names[dram:end])
        return names[:dram], names[dram:end]

    def forget(self, names: Iterable[ChunkName]) -> None:
        """Drop chunks from every tier, with unfinished writes."""
        for name in names:
            self.dram.names.pop(name, None)
            self.ssd.names.pop(name, None)
            if self.pending.pop(name, None) is not None:
                self.ssd.reserved -= 1
            self._evicted[name] = None

    def clear(self) -> None:
        self.forget([*self.dram.names, *self.ssd.names, *self.pending])

    def has(self, name: ChunkName) -> bool:
        """Whether any tier has the chunk or writes it."""
        return name in self.dram.names or name in self.ssd.names or name in self.pending

    def transfers(self) -> list[KVTransfer]:
        """Loads since the last call, oldest first, without the time they waited for a link."""
        moved = list(self._transfers)
        self._transfers.clear()
        return moved

    def take_evicted(self) -> list[ChunkName]:
        """Chunks that have left every tier since the last call: their bytes may be deleted."""
        evicted = [n for n in self._evicted if not self.has(n)]
        self._evicted.clear()
        return evicted

    def check(self) -> None:
        """Raise InvariantError unless the counts balance."""
        for name, tier in (("DRAM", self.dram), ("SSD", self.ssd)):
            held, reserved = len(tier.names), tier.reserved
            if held + reserved > tier.capacity:
                raise InvariantError(f"{name}: held({held}) + reserved({reserved}) > {tier.capacity}")
        if self.ssd.reserved != len(self.pending):
            raise InvariantError(f"reserved({self.ssd.reserved}) != pending({len(self.pending)})")
        if both := self.pending.keys() & self.ssd.names.keys():
            raise InvariantError(f"{len(both)} chunks are on the disk and on their way to it")

    def _admit(self, name: ChunkName, keep: Collection[ChunkName]) -> bool:
        evicted = self.dram.make_room(keep)
        if evicted is None:
            return False
        self._evicted.update(dict.fromkeys(evicted))
        self.dram.names[name] = None
        return True

    def _write(self, now_s: float, name: ChunkName) -> None:
        if name in self.ssd.names:
            self.ssd.touch((name,))
        elif name not in self.pending and self.ssd.capacity >= 1:
            evicted = self.ssd.make_room()
            if evicted is None:  # the whole disk is reserved for unfinished writes
                return
            self._evicted.update(dict.fromkeys(evicted))
            self.ssd.reserved += 1
            self.pending[name] = self.disk_write.reserve(now_s, self.chunk_bytes)

    def _size(self, names: Collection[ChunkName]) -> int:
        return len(names) * self.chunk_bytes


def _leading(names: Sequence[ChunkName], held: Collection[ChunkName]) -> int:
    return next((i for i, n in enumerate(names) if n not in held), len(names))
