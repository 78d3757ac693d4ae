"""A pin is one more reference on each of a finished turn's hashed blocks; vLLM's own code does the rest.

Private members used, unchanged from vLLM 0.30 to 0.33: KVCacheManager.get_blocks and .block_pool,
BlockPool.touch / free_blocks / get_num_free_blocks / free_block_queue, its remove / prepend_n,
BlockPool.evict_blocks / blocks, each SingleTypeKVCacheManager's req_to_blocks and num_cached_block,
KVCacheBlock.ref_cnt / is_null / _block_hash (`block_hash` is a call for each block of each turn).
A null block has no hash. Read in 0.32: KVCacheCoordinator.find_longest_cache_hit, which changes nothing, and
.eagle_group_ids.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, MambaManager
from vllm.v1.request import Request

DENSITY_DECAY = 0.99  # each finished turn: half of the weight is that of the latest 70


class GpuBlocks:
    """vLLM's block pool, as pins use it. retention/pin_table.py has the blocks of each pin.

    `tokens_per_block`: the block size, if all layers keep all tokens. Else a token has a block's share in
    each group of layers, and layers with windows free theirs: then it is what finished turns had.
    """

    def __init__(self, kv_cache_manager: KVCacheManager, block_tokens: int) -> None:
        self._manager = kv_cache_manager
        self._pool = kv_cache_manager.block_pool
        self._kinds = kv_cache_manager.coordinator.single_type_managers
        self.keeps_all = [type(kind) for kind in self._kinds] == [FullAttentionManager]
        self._block_tokens = block_tokens
        self.tokens_per_block: float = block_tokens
        self._ended_tokens = self._ended_blocks = 0.0  # of turns that ended, the latest ones most
        self._to_evict_first: list[KVCacheBlock] = []  # of an ended program, once they are free
        self.to_hold: Sequence[int] = ()  # of a new pin, once its turn's request is freed

    def on_turn_end(self, request_id: str, tokens: int) -> None:
        """A turn is about to free its blocks; they hold the KV of so many tokens."""
        if self.keeps_all or not tokens:
            return
        groups = self._manager.get_blocks(request_id).blocks
        blocks = sum(not b.is_null for group in groups for b in group)
        self._ended_tokens = self._ended_tokens * DENSITY_DECAY + tokens
        self._ended_blocks = self._ended_blocks * DENSITY_DECAY + blocks
        self.tokens_per_block = self._ended_tokens / max(self._ended_blocks, 1.0)

    @property
    def kv_tokens(self) -> int:
        return int(self._pool.num_gpu_blocks * self.tokens_per_block)

    def pinnable(self, request: Request, tokens: int) -> list[int]:
        """The ids of the request's full, hashed blocks in its first `tokens`, head first: what a next turn
        could hit.

        Where layers do not keep all tokens vLLM's coordinator says that: of layers that keep a state, a hit
        needs the last one at a block's end, which the request has freed while it generated. Beside a draft
        model a hit ends a block early, and that block must be there, but of states.
        """
        groups = self._manager.get_blocks(request.request_id).blocks
        if self.keeps_all:
            groups = (groups[0][: tokens // self._block_tokens],)
        else:
            coordinator = self._manager.coordinator
            hits = coordinator.find_longest_cache_hit(request.block_hashes, tokens)[0]
            proven = [
                n in coordinator.eagle_group_ids and not isinstance(kind, MambaManager)
                for n, kind in enumerate(self._kinds)
            ]
            groups = tuple(
                [*hit, *own[len(hit) : len(hit) + is_proven]]
                for hit, own, is_proven in zip(hits, groups, proven, strict=True)
            )
        return [b.block_id for group in groups for b in group if b._block_hash is not None]

    def take_over(self, request_id: str) -> None:
        """The request's blocks are freed next. If they begin with those to hold, these keep its references:
        so none is counted up and down again."""
        count, own = len(self.to_hold), self._kinds[0].req_to_blocks.get(request_id, [])
        if self.keeps_all and 0 < count <= len(own) and own[count - 1].block_id == self.to_hold[-1]:
            self._kinds[0].req_to_blocks[request_id] = own[count:]
            self.to_hold = ()

    def on_freed(self) -> None:
        """The request was freed, or a connector still stores its blocks and frees them later.

        An ended program's are the next to be reused, tail first, if they are free now. They stay in the cache
        until then, since they may begin with a prompt that other programs will share.
        """
        self.hold(self.to_hold)
        queue, free = self._pool.free_block_queue, [b for b in self._to_evict_first if b.ref_cnt == 0]
        self.to_hold, self._to_evict_first = (), []
        for block in free:
            queue.remove(block)
        queue.prepend_n(free[::-1])

    def hold(self, block_ids: Sequence[int]) -> None:
        """Add a reference to each; they are in use, or were freed and are still in the cache."""
        self._pool.touch([self._pool.blocks[i] for i in block_ids])

    def release(self, block_ids: Sequence[int]) -> None:
        """Remove a reference from each, tail first: the tail is evicted first, the prefix last."""
        last, blocks = [], self._pool.blocks
        for block_id in reversed(block_ids):
            block = blocks[block_id]
            if block.ref_cnt > 1:  # usually: the program's next turn has it
                block.ref_cnt -= 1
            else:
                last.append(block)
        self._pool.free_blocks(last)

    def note_ended(self, request_id: str, shared_tokens: int) -> None:
        """The request ends its program: its own blocks after its first `shared_tokens` should go first.

        Where layers do not keep all tokens nothing is done: a block's number does not give its tokens.
        """
        if self.keeps_all:
            groups = self._manager.get_blocks(request_id).blocks
            own = groups[0][-(-shared_tokens // self._block_tokens) :]
            self._to_evict_first = [b for b in own if b.ref_cnt == 1 and not b.is_null]

    def forget_all(self) -> None:
        """Remove all KV from the prefix cache. What live requests compute on theirs will not enter it."""
        self._pool.evict_blocks({b.block_id for b in self._pool.blocks if b._block_hash is not None})
        for kind in self._kinds:
            live = (request_id for request_id, blocks in kind.req_to_blocks.items() if blocks)
            kind.num_cached_block.update(dict.fromkeys(live, sys.maxsize))  # all are cached, as it were

    def is_used_by(self, request_id: str, block_ids: Sequence[int]) -> bool:
        groups = self._manager.get_blocks(request_id).blocks
        if block_ids and groups[0] and groups[0][0].block_id == block_ids[0]:  # usually
            return True
        mine = {b.block_id for group in groups for b in group}
        return any(block_id in mine for block_id in block_ids)

    def can_free(self, pins: Iterable[Sequence[int]], wanted_blocks: int) -> bool:
        """Whether this many blocks would become free if all these pins were released.

        Called in each step that refuses a request: it stops at the pin that completes the number.
        """
        counts: Counter[int] = Counter()
        freed, blocks = 0, self._pool.blocks
        for block_ids in pins:
            for block_id in block_ids:
                ref_cnt = blocks[block_id].ref_cnt
                if ref_cnt == 1:
                    freed += 1
                    continue
                counts[block_id] += 1
                freed += counts[block_id] == ref_cnt
            if freed >= wanted_blocks:
                return True
        return freed >= wanted_blocks

    def free_count(self) -> int:
        return int(self._pool.get_num_free_blocks())
