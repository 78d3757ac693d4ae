"""Where a prompt's tokens come from, now or after the GPU evicts them: vLLM's cache and the tiers together.

A connector that does not report where KV is counts as no tier: what the GPU loses must be computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from vllm.v1.request import Request

from continuum_lmcache.reload.tier_store import (
    KVTransfer,
    LookupRecord,
    SelectiveLoader,
    StoreStatus,
    TierHit,
    TierStore,
)
from continuum_lmcache.types import Residency, Tier
from continuum_lmcache.vllm_plugin.requests import TurnState

NOTHING = TierHit(0, 0)


class ResidencyLookup:
    """Queries the tier store, if there is one, and counts the sources of prompts' tokens."""

    def __init__(self, connector: Any) -> None:
        store = connector if isinstance(connector, TierStore) else None
        self._store = store
        # checked once, here: isinstance with a protocol takes 10 us
        self._store_status = store if isinstance(store, StoreStatus) else None
        self._lookup_record = store if isinstance(store, LookupRecord) else None
        self.has_tiers = isinstance(store, SelectiveLoader) and bool(store.capacity_tokens())
        self.mode = "none" if connector is None else "unknown"
        if isinstance(connector, StoreStatus):
            self.mode = connector.mode
        self.times_loads = store is not None or connector is None
        self.prompt_tokens: Counter[str] = Counter(gpu=0, dram=0, ssd=0, none=0)
        self.returned_tokens: Counter[str] = Counter(gpu=0, dram=0, ssd=0, none=0)

    @property
    def is_up(self) -> bool:
        return True if self._store_status is None else self._store_status.is_up

    def after_eviction(self, request: Request, tokens: int) -> Residency:
        """Where the context's first `tokens` would come from after the GPU evicts them."""
        hit = self._tier_hit(request, tokens)
        return Residency(0, hit.dram_tokens, hit.ssd_tokens, tokens)

    def served_from(self, request: Request, turn: TurnState) -> Residency:
        """Where a turn's prompt comes from as it starts. Without a store a load counts as DRAM's."""
        total = request.num_prompt_tokens
        gpu = min(turn.gpu_tokens, total)
        loaded = min(turn.loaded_tokens, total - gpu)
        in_dram = self._source(request, total).dram_tokens if loaded and self._store is not None else total
        dram = max(0, min(in_dram - gpu, loaded))
        return Residency(gpu, dram, loaded - dram, total)

    def capacity_tokens(self) -> Mapping[Tier, int]:
        return self._store.capacity_tokens() if self._store is not None else {}

    def transfers(self) -> list[KVTransfer]:
        return self._store.transfers() if self._store is not None else []

    def totals(self) -> dict[str, dict[str, float]]:
        """For the metrics: the sources of prompts' tokens."""
        return {"prompt_tokens": dict(self.prompt_tokens), "returned_tokens": dict(self.returned_tokens)}

    def count(self, served: Residency) -> None:
        self.prompt_tokens["gpu"] += served.gpu_tokens
        self.prompt_tokens["dram"] += served.dram_tokens
        self.prompt_tokens["ssd"] += served.ssd_tokens
        self.prompt_tokens["none"] += served.recompute_tokens

    def count_returned(self, served: Residency, context_tokens: int) -> None:
        """Add one prompt whose first `context_tokens` are those of the program's last turn."""
        left_tokens = context_tokens
        held = {"gpu": served.gpu_tokens, "dram": served.dram_tokens, "ssd": served.ssd_tokens}
        for tier, tokens in held.items():
            self.returned_tokens[tier] += min(tokens, left_tokens)
            left_tokens -= min(tokens, left_tokens)
        self.returned_tokens["none"] += left_tokens

    def _source(self, request: Request, tokens: int) -> TierHit:
        """Where a load came from."""
        found = None if self._lookup_record is None else self._lookup_record.hit_at_lookup(request.request_id)
        return self._tier_hit(request, tokens) if found is None else found

    def _tier_hit(self, request: Request, tokens: int) -> TierHit:
        if self._store is None:
            return NOTHING
        token_ids = request.all_token_ids[:tokens]
        if request.cache_salt:
            return self._store.locate(token_ids, request.cache_salt)
        return self._store.locate(token_ids)
