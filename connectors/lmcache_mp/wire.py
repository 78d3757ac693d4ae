"""The messages between the LMCache server's tier module (server/module.py) and the connector."""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]  # no infinity, and nothing that is no number
Name = Annotated[bytes, msgspec.Meta(min_length=1, max_length=128)]
METHOD = "continuum.tiers"
MODULE = "connectors.lmcache_mp_module"


class ChangesRequest(msgspec.Struct, frozen=True):
    """Asks for one model's changes since `number` of the server's `epoch`; None: the client has none yet."""

    model: str
    world_size: int  # number of pieces of a chunk's KV
    epoch: str | None = None
    number: int = 0
    scheduler: Annotated[str, msgspec.Meta(max_length=64)] = ""  # a name of its own; "": a worker asks


class NumberedChange(msgspec.Struct, frozen=True, array_like=True):
    """One chunk, all its pieces, is now in a tier, or has lost its first piece there."""

    number: Count
    ssd: bool
    admitted: bool
    chunk: Name  # chunk_name()


class LookupResult(msgspec.Struct, frozen=True, array_like=True):
    """What one request's lookup read into L1."""

    number: Count
    request_id: str
    ssd_tokens: Count  # tokens whose KV was read from L2
    ssd_read_s: Seconds  # from asking L2 to the end of the last read


class ChangesReply(msgspec.Struct, frozen=True):
    """The answer. A snapshot has all chunks of the tiers as admitted, and replaces earlier changes.

    One with a value out of its range is not read at all (`TierPoller.poll`)."""

    epoch: str  # of the server's process: another process has other numbers
    number: Count  # of the newest entry
    is_snapshot: bool
    changes: list[NumberedChange]
    lookups: list[LookupResult]
    dram_bytes: Count  # that L1 holds before it evicts
    ssd_bytes: Count | None  # the same of L2; 0: there is none; None: an adapter has no size, such as `fs`
    dram_spare_bytes: Count  # of L1, kept free by eviction for reads from L2
    read_lease_s: Seconds  # for how long a lookup locks what it found
    hash_algorithm: str
    clock_s: Seconds  # of the server's machine, at the answer
    lmcache: str  # LMCache's version in the server
    continuum: str  # this package's
    schedulers: Positive  # that have asked lately: the tiers are theirs together
    knows_all: bool  # whether the changes tell all that the tiers hold
    damaged_chunks: Count = 0  # of L2, since the server's start: found at their load, and not used
    failed_stores: Count = 0  # of chunks into L2, since then


def chunk_name(chunk_hash: bytes, salt: str) -> bytes:
    """A chunk's name, unique among all tenants. It does not tell the tenant's salt."""
    return hashlib.blake2b(salt.encode(), digest_size=16).digest() + chunk_hash if salt else chunk_hash
