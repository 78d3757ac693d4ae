"""How long MP's asynchronous loads and stores took, by tier.

The worker knows when a load began and ended. Only the server knows what it read from L2 for the load,
and how long that took (lookup_log.py). Both have the request's id, by which this module joins them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from connectors.lmcache_mp.wire import LookupResult
from continuum_lmcache.reload.tier_store import KVTransfer
from continuum_lmcache.types import Tier

MAX_ENTRIES = 10_000
Entry = TypeVar("Entry")


class TimedLoad(NamedTuple):
    """One load of one request, from L1 to the GPU, as a worker timed it."""

    request_id: str
    tokens: int
    size_bytes: int
    duration_s: float


@dataclass
class MpReport(KVConnectorWorkerMetadata):
    """What rank 0 moved since its last report. The other ranks move their shares in the same time."""

    loads: list[TimedLoad] = field(default_factory=list)
    stores: list[KVTransfer] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> MpReport:
        assert isinstance(other, MpReport)
        return MpReport(self.loads + other.loads, self.stores + other.stores)


class LoadLookupJoin:
    """Loads without their lookup yet, and lookups without their load."""

    def __init__(self) -> None:
        self._loads: OrderedDict[str, TimedLoad] = OrderedDict()
        self._lookups: OrderedDict[str, LookupResult] = OrderedDict()

    def join(self, loads: Sequence[TimedLoad], lookups: Sequence[LookupResult]) -> list[KVTransfer]:
        """The transfers of all loads that both sides have reported."""
        for lookup in lookups:
            keep(self._lookups, lookup.request_id, lookup)
        for load in loads:
            keep(self._loads, load.request_id, load)
        both = [request_id for request_id in self._loads if request_id in self._lookups]
        moved = [by_tier(self._loads.pop(each), self._lookups.pop(each)) for each in both]
        return [transfer for transfers in moved for transfer in transfers]


def keep(entries: OrderedDict[str, Entry], request_id: str, entry: Entry) -> None:
    """Add it. The oldest is dropped: another engine's lookup, or a hit without a load."""
    entries[request_id] = entry
    if len(entries) > MAX_ENTRIES:
        entries.popitem(last=False)


def by_tier(load: TimedLoad, lookup: LookupResult) -> list[KVTransfer]:
    """A load's transfers. The copy to the GPU is divided by bytes; the time to read L2 counts for L2 alone.

    A load shorter than the hit lacks the head, which vLLM's own cache had; L1's part is reduced first.
    """
    ssd_tokens = min(lookup.ssd_tokens, load.tokens)
    read_s = {Tier.DRAM: 0.0, Tier.SSD: lookup.ssd_read_s}
    moved = []
    for tier, tokens in {Tier.DRAM: load.tokens - ssd_tokens, Tier.SSD: ssd_tokens}.items():
        if tokens:
            share = tokens / load.tokens
            size_bytes, copy_s = round(load.size_bytes * share), load.duration_s * share
            took_s = read_s[tier] + copy_s
            moved.append(KVTransfer(tier, "load", tokens, size_bytes, took_s, load.request_id, in_step=False))
    return moved
