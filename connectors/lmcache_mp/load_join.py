"""How long MP's asynchronous loads took, by tier.

The worker knows when a load began and ended. Only the server knows what it read from L2 for the load,
and how long that took (lookup_log.py). Both have the request's id, by which this module joins them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from connectors.lmcache_mp.wire import LookupResult
from continuum_lmcache.bounded_dict import BoundedDict
from continuum_lmcache.reload.tier_store import KVTransfer
from continuum_lmcache.types import Tier

MAX_ENTRIES = 10_000  # beyond it the oldest is dropped: another engine's lookup, or a hit without a load


@dataclass
class MpReport(KVConnectorWorkerMetadata):
    """What rank 0 loaded from L1, so from DRAM, since its last report. The others take as long."""

    loads: list[KVTransfer]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> MpReport:
        assert isinstance(other, MpReport)
        return MpReport(self.loads + other.loads)


class LoadLookupJoin:
    """Loads without their lookup yet, and lookups without their load."""

    def __init__(self) -> None:
        self._loads: BoundedDict[str, KVTransfer] = BoundedDict(MAX_ENTRIES)
        self._lookups: BoundedDict[str, LookupResult] = BoundedDict(MAX_ENTRIES)

    def join(self, loads: Sequence[KVTransfer], lookups: Sequence[LookupResult]) -> list[KVTransfer]:
        """The transfers of all loads that both sides have reported."""
        for lookup in lookups:
            self._lookups[lookup.request_id] = lookup
        for load in loads:
            self._loads[load.turn] = load
        both = [request_id for request_id in self._loads if request_id in self._lookups]
        moved = [by_tier(self._loads.pop(each), self._lookups.pop(each)) for each in both]
        return [transfer for transfers in moved for transfer in transfers]


def by_tier(load: KVTransfer, lookup: LookupResult) -> list[KVTransfer]:
    """A load's transfers. The copy to the GPU is divided by bytes; the time to read L2 counts for L2 alone.

    A load shorter than the hit lacks the head, which vLLM's own cache had; L1's part is reduced first.
    """
    ssd_tokens = min(lookup.ssd_tokens, load.tokens)
    read_s = {Tier.DRAM: 0.0, Tier.SSD: lookup.ssd_read_s}
    moved = []
    for tier, tokens in {Tier.DRAM: load.tokens - ssd_tokens, Tier.SSD: ssd_tokens}.items():
        if tokens:
            share = tokens / load.tokens
            size_bytes, took_s = round(load.size_bytes * share), read_s[tier] + load.duration_s * share
            moved.append(replace(load, tier=tier, tokens=tokens, size_bytes=size_bytes, duration_s=took_s))
    return moved
