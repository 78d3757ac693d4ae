"""Where a prompt's tokens come from, now or if they were given up: vLLM's cache and the tiers together."""

from __future__ import annotations

from collections import Counter

from vllm.v1.request import Request

from continuum_lmcache.stores import Stores
from continuum_lmcache.tiers import Holding, TierStore, Transfer
from continuum_lmcache.types import Residency
from continuum_lmcache.vllm_plugin.turns import LiveTurn

NOTHING = Holding(0, 0)


class Supply:
    """Asks the tier store, where there is one, and counts what prompts were made of."""

    def __init__(self, store: TierStore | None) -> None:
        self._store = store
        self.prompt_tokens: Counter[str] = Counter()  # by tier

    def if_given_up(self, request: Request) -> Residency:
        """Where the context would come from if its blocks were freed: the GPU's copy is taken for lost."""
        held = self._holding(request, request.num_tokens)
        return Residency(0, held.dram_tokens, held.ssd_tokens, request.num_tokens)

    def of(self, request: Request, turn: LiveTurn) -> Residency:
        """Where a turn's prompt comes from as it starts. Without a store a load counts as DRAM's."""
        total = request.num_prompt_tokens
        gpu = min(turn.gpu_tokens, total)
        loaded = min(turn.loaded_tokens, total - gpu)
        in_dram = self._holding(request, total).dram_tokens if loaded and self._store is not None else total
        dram = max(0, min(in_dram - gpu, loaded))
        return Residency(gpu, dram, loaded - dram, total)

    def transfers(self) -> list[Transfer]:
        """What the tiers moved since the last call."""
        return self._store.transfers() if self._store is not None else []

    def stores(self) -> Stores:
        """What says whether storing pays; without a store nothing is to be stopped."""
        return Stores(stalls=self._store is not None and self._store.stalls())

    def store_from_now(self, wanted: bool) -> None:
        if self._store is not None:
            self._store.store_from_now(wanted)

    def forget(self, request: Request, kept_tokens: int) -> None:
        """Drop what the tiers hold of the request behind its first `kept_tokens`."""
        if self._store is not None:
            self._store.forget(request.all_token_ids, kept_tokens)

    def count(self, served: Residency) -> None:
        """Add one prompt to the counts."""
        self.prompt_tokens["gpu"] += served.gpu_tokens
        self.prompt_tokens["dram"] += served.dram_tokens
        self.prompt_tokens["ssd"] += served.ssd_tokens
        self.prompt_tokens["none"] += served.recompute_tokens

    def _holding(self, request: Request, tokens: int) -> Holding:
        if self._store is None:
            return NOTHING
        return self._store.locate(request.all_token_ids[:tokens])
