"""Finds what a program's next turn hits by its pin, where vLLM looks up each block of the prompt.

A pin has held its blocks since the last turn, and a block's hash covers all tokens before it, with salt,
adapter and images: the deepest block of the pin that has the prompt's hash says that those before it are the
prompt's too. vLLM looks up the rest, from that block on.

Seams, read in vLLM 0.30 to 0.33: KVCacheManager.get_computed_blocks, which asks
KVCacheCoordinator.find_longest_cache_hit, and not where a request may not read the cache;
make_block_hash_with_group_id; KVCacheBlock._block_hash, which is reset before a block's KV may change: of a
block in use in BlockPool.evict_blocks alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import takewhile
from operator import attrgetter
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.request import Request

from continuum_lmcache.programs.turns import TurnTable
from continuum_lmcache.retention.pin_table import PinTable
from continuum_lmcache.types import TurnId

HASH = attrgetter("_block_hash")


class PinnedHits:
    """Replaces methods of one manager and its pool, whose layers all keep all tokens."""

    def __init__(self, manager: KVCacheManager, turns: TurnTable, pins: PinTable) -> None:
        self._turns, self._pins, coordinator = turns, pins, manager.coordinator
        pool, self._all_blocks = manager.block_pool, manager.block_pool.blocks
        self._pinned: Sequence[KVCacheBlock] = ()  # of the program whose request is looked up
        self._latest: tuple[Sequence[int], Sequence[KVCacheBlock]] = ((), ())
        """The block ids of the pin that was looked up last, since a turn without room is looked up each step,
        and the first of its blocks, up to one that a failed load has left without KV."""
        self._block_tokens = coordinator.single_type_managers[0].block_size
        self._get, self._find = manager.get_computed_blocks, coordinator.find_longest_cache_hit
        self._evict = pool.evict_blocks
        manager.get_computed_blocks = self.get_computed_blocks  # type: ignore[method-assign]
        coordinator.find_longest_cache_hit = self.find_longest_cache_hit  # type: ignore[method-assign]
        pool.evict_blocks = self.evict_blocks  # type: ignore[method-assign]

    def evict_blocks(self, block_ids: set[int]) -> None:
        """vLLM's: these blocks have no KV any more, though a pin may hold them."""
        self._latest = ((), ())
        self._evict(block_ids)

    def get_computed_blocks(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """vLLM's, which calls `find_longest_cache_hit`."""
        turn = self._turns.get(TurnId(request.request_id))
        pin = self._pins.pinned.get(turn.program.id) if turn is not None else None
        if pin is not None:
            if pin.block_ids is not self._latest[0]:
                blocks = map(self._all_blocks.__getitem__, pin.block_ids)
                self._latest = pin.block_ids, list(takewhile(HASH, blocks))
            self._pinned = self._latest[1]
        try:
            return self._get(request, *args, **kwargs)
        finally:
            self._pinned = ()

    def find_longest_cache_hit(self, block_hashes: list[Any], max_cache_hit_length: int) -> Any:
        """(hit blocks of each group, their tokens, ...), as vLLM answers it."""
        pinned = self._pinned
        most = min(len(pinned), len(block_hashes), max_cache_hit_length // self._block_tokens)
        same = bisect_left(
            range(most),
            True,
            key=lambda at: pinned[at]._block_hash != make_block_hash_with_group_id(block_hashes[at], 0),
        )
        if same <= 1:  # vLLM finds the last one, since it may have to drop one
            return self._find(block_hashes, max_cache_hit_length)
        tokens = (same - 1) * self._block_tokens
        (rest,), found, *more = self._find(block_hashes[same - 1 :], max_cache_hit_length - tokens)
        return ([*pinned[: same - 1], *rest],), tokens + found, *more
