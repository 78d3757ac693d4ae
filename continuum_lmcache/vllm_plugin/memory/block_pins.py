"""A pin is one more reference on each of a finished turn's hashed blocks; the stock code does the rest.

Privates touched, unchanged from vLLM 0.30 to 0.33: KVCacheManager.get_blocks and .block_pool,
BlockPool.touch / free_blocks / evict_blocks / get_num_free_blocks, KVCacheBlock.ref_cnt / is_null /
_block_hash (`block_hash` is a call for each block of each turn).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from continuum_lmcache.types import ProgramId


class BlockPins:
    """Which blocks each pin holds. Counts and deadlines are the ProgramTable's."""

    def __init__(self, kv_cache_manager: KVCacheManager, block_tokens: int) -> None:
        self._manager = kv_cache_manager
        self._pool = kv_cache_manager.block_pool
        self._block_tokens = block_tokens
        self._held: dict[ProgramId, list[KVCacheBlock]] = {}
        self._lent: set[ProgramId] = set()  # whose blocks are free on trial

    def keepable(self, request_id: str, tokens: int) -> list[KVCacheBlock]:
        """The full, hashed blocks of the request's first `tokens`, head first: what a next turn could hit.

        All of them for models with more than one kind of KV, where a block's number says less.
        """
        groups = self._manager.get_blocks(request_id).blocks
        if len(groups) == 1:
            groups = (groups[0][: tokens // self._block_tokens],)
        return [b for group in groups for b in group if b._block_hash is not None and not b.is_null]

    def take(self, program: ProgramId, blocks: list[KVCacheBlock]) -> None:
        """Hold the blocks, which somebody still uses or which were given back just now."""
        self._pool.touch(blocks)
        self._held[program] = blocks

    def give_back(self, program: ProgramId) -> None:
        """Let go, tail first: the tail is evicted first, and the prefix survives longest."""
        blocks = self._held.pop(program)
        if program in self._lent:
            self._lent.remove(program)
        else:
            self._pool.free_blocks(reversed(blocks))

    def lend(self, program: ProgramId) -> None:
        """Free the blocks on trial. Ends with `give_back` if something was allocated, else with `recall`."""
        self._pool.free_blocks(reversed(self._held[program]))
        self._lent.add(program)

    def recall(self, program: ProgramId) -> None:
        """Nothing was allocated: the blocks are as they were, and held again."""
        self._lent.remove(program)
        self._pool.touch(self._held[program])

    def bury(self, request_id: str, shared_tokens: int) -> None:
        """Make the request's own blocks behind its first `shared_tokens` the next to be reused.

        Without a hash nobody finds a block, and vLLM reuses it before all that are cached. Models with
        more than one kind of KV are left alone: there a block's number says less of what is in it.
        """
        groups = self._manager.get_blocks(request_id).blocks
        if len(groups) == 1:
            own = groups[0][-(-shared_tokens // self._block_tokens) :]
            self._pool.evict_blocks({b.block_id for b in own if b.ref_cnt == 1 and not b.is_null})

    def is_reused(self, program: ProgramId, request_id: str) -> bool:
        """Whether the request took over any of the pin's blocks."""
        held, groups = self._held.get(program, []), self._manager.get_blocks(request_id).blocks
        if held and groups[0] and groups[0][0] is held[0]:  # as a rule
            return True
        mine = {b.block_id for group in groups for b in group}
        return any(b.block_id in mine for b in held)

    def can_free(self, programs: Iterable[ProgramId], wanted_blocks: int) -> bool:
        """Whether so many blocks would become free if all these pins were given up: nobody else uses them.

        Asked in each step that refuses a request: it stops at the pin that covers what is wanted.
        """
        counts: Counter[int] = Counter()
        freed = 0
        for program in programs:
            for block in self._held[program]:
                if block.ref_cnt == 1:
                    freed += 1
                    continue
                counts[block.block_id] += 1
                freed += counts[block.block_id] == block.ref_cnt
            if freed >= wanted_blocks:
                return True
        return freed >= wanted_blocks

    def free_blocks(self) -> int:
        """Blocks free now."""
        return int(self._pool.get_num_free_blocks())

    def __len__(self) -> int:
        return len(self._held)
