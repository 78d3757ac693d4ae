"""Has the store raise paused programs' KV from its disk to its DRAM, shortly before they return."""

from __future__ import annotations

import math
from dataclasses import replace

from vllm.v1.request import Request

from continuum_lmcache.prefetch import LOOK_AGAIN_S, Plan, Plans, start_s
from continuum_lmcache.tiers import Prefetching
from continuum_lmcache.types import ProgramId, Residency, Tier
from continuum_lmcache.vllm_plugin.keeper import Keeper


class Prefetcher:
    """Plans a fetch at each pause and starts it when it is due, unless the GPU has its copy still.

    Only where steps wait for their loads: beside the steps a load from a slow disk costs one turn's time,
    and prefetching it gave nothing beyond noise (experiments/LOG.md, 2026-11-21).
    """

    def __init__(self, keeper: Keeper, store: object) -> None:
        self._keeper = keeper
        has_disk = Tier.SSD in keeper.appraiser.survival.capacity_tokens
        wanted = keeper.appraiser.prefetches and has_disk and not keeper.supply.loads_beside_steps
        self._store = store if wanted and isinstance(store, Prefetching) else None
        self._plans, self._on_gpu = Plans(), Plans()

    def paused(self, now_s: float, request: Request, program: ProgramId | None) -> None:
        """A request has ended, and its blocks are still its own: if that was a pause, plan for its end."""
        entry = self._keeper.ledger.programs.get(program) if self._store and program is not None else None
        if self._store is None or entry is None or entry.live or entry.finished_s != now_s:
            return
        blocks = self._keeper.pins.keepable(request.request_id, entry.context_tokens)
        gaps = self._keeper.appraiser.gaps.nearest(entry.tool)
        on_disk = Residency(0, 0, entry.context_tokens, entry.context_tokens)
        due_s = start_s(now_s, gaps, self._keeper.appraiser.rates.costs.reload_s(on_disk))
        if not blocks or math.isinf(due_s):
            return
        last, name = blocks[-1], blocks[-1].block_hash  # the tail is evicted first
        fetch = self._store.fetcher(request.all_token_ids[: entry.context_tokens], request.cache_salt or "")
        self._plans.add(Plan(due_s, entry.id, now_s, lambda: bool(last.block_hash == name), fetch))

    def look(self, now_s: float) -> None:
        """Start what is due."""
        if self._store is None:
            return
        for plan in [*self._plans.due(now_s), *self._on_gpu.due(now_s)]:
            entry = self._keeper.ledger.programs.get(plan.program)
            if entry is None or entry.live or entry.finished_s != plan.paused_s:
                continue
            if plan.on_gpu():
                self._on_gpu.add(replace(plan, due_s=now_s + LOOK_AGAIN_S))
            else:
                self._keeper.supply.prefetches += 1
                plan.fetch()

    def next_s(self) -> float | None:
        """When an idle engine is to look. What its GPU has an idle engine does not lose."""
        return self._plans.next_s()
