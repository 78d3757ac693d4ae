"""Where a prompt's tokens come from, now or after the GPU evicts them: vLLM's cache and the tiers together.

A connector that does not report where KV is counts as no tier: what the GPU loses must be computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from vllm.v1.request import Request

from continuum_lmcache.programs.turns import Turn
from continuum_lmcache.reload.tier_store import NOTHING, Prefix, TierHit, TierStore
from continuum_lmcache.types import Residency


class ResidencyLookup:
    """Queries the tier store, if there is one. `TurnEvents` counts the sources of prompts' tokens."""

    def __init__(self, connector: Any) -> None:
        self.has_tiers = isinstance(connector, TierStore)
        self.knows_sources = connector is None or self.has_tiers
        self.store = connector if isinstance(connector, TierStore) else TierStore()
        self.mode = "none" if connector is None else self.store.mode
        self.prompt_tokens: Counter[str] = Counter(gpu=0, dram=0, ssd=0, none=0)
        self.returned_tokens: Counter[str] = Counter(gpu=0, dram=0, ssd=0, none=0)

    def after_eviction(self, request: Request, tokens: int) -> Residency:
        """Where the context's first `tokens` would come from after the GPU evicts them."""
        hit = self._tier_hit(request, tokens)
        return Residency(0, hit.dram_tokens, hit.ssd_tokens, tokens)

    def served_from(self, request: Request, turn: Turn) -> Residency:
        """Where a turn's prompt comes from as it starts. Without a store a load counts as DRAM's."""
        total = request.num_prompt_tokens
        gpu = min(turn.gpu_tokens, total)
        loaded = min(turn.loaded_tokens, total - gpu)
        in_dram = total
        if loaded and self.knows_sources:
            found = self.store.hit_at_lookup(request.request_id) or self._tier_hit(request, total)
            in_dram = found.dram_tokens
        dram = max(0, min(in_dram - gpu, loaded))
        return Residency(gpu, dram, loaded - dram, total)

    def _tier_hit(self, request: Request, tokens: int) -> TierHit:
        if not self.has_tiers:
            return NOTHING
        token_ids: Sequence[int] = request.all_token_ids
        if tokens < len(token_ids):
            token_ids = token_ids[:tokens]
        salt, adapter = request.cache_salt or "", request.lora_request
        return self.store.locate(Prefix(token_ids, request.block_hashes, salt, adapter))


def add_sources(counts: Counter[str], served: Residency, tokens: int) -> None:
    """Count the first `tokens` of a prompt by where their KV came from."""
    held = {"gpu": served.gpu_tokens, "dram": served.dram_tokens, "ssd": served.ssd_tokens}
    for tier, held_tokens in held.items():
        counts[tier] += min(held_tokens, tokens)
        tokens -= min(held_tokens, tokens)
    counts["none"] += tokens
