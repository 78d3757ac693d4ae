"""What the LMCache server's tier module (lmcache_mp_module.py) and the connector say to each other."""

from __future__ import annotations

import msgspec

METHOD = "continuum.tiers"
MODULE = "connectors.lmcache_mp_module"


class ChangesRequest(msgspec.Struct, frozen=True):
    """What is new for one model since `number` of the server's `epoch`? None: the asker knows nothing yet."""

    model: str
    world_size: int  # pieces that one chunk's KV is split into
    epoch: str | None = None
    number: int = 0


class NumberedChange(msgspec.Struct, frozen=True, array_like=True):
    """One chunk, all its pieces, came into a tier or began to leave it."""

    number: int
    ssd: bool
    admitted: bool
    chunk: bytes  # chunk_name()


class LookupResult(msgspec.Struct, frozen=True, array_like=True):
    """What one request's lookup found and made ready in L1."""

    number: int
    request_id: str
    dram_tokens: int
    ssd_tokens: int  # of these tokens the KV was read from L2
    ssd_read_s: float  # from the first read's start to the last one's end


class ChangesReply(msgspec.Struct, frozen=True):
    """The answer. A snapshot names all that the tiers hold as admitted, and makes what was known void."""

    epoch: str  # of the server's process: another one knows other numbers
    number: int  # of the newest entry
    is_snapshot: bool
    changes: list[NumberedChange]
    lookups: list[LookupResult]
    dram_bytes: int
    ssd_bytes: int | None  # None: an adapter has no size of its own, such as `fs`
    dram_spare_share: float  # of L1 kept free by eviction: what L2 is read into
    read_lease_s: float  # a lookup's hold on what it found ends after this
    hash_algorithm: str
    clock_s: float = 0.0  # of the server's machine, when it answered
    lmcache: str = ""  # LMCache's version in the server; "": a release that does not say it
    continuum: str = ""  # this package's


def chunk_name(chunk_hash: bytes, salt: str) -> bytes:
    """A chunk among all tenants'. The hash has one length, so names are unambiguous."""
    return salt.encode() + chunk_hash
