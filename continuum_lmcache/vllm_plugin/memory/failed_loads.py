"""Which blocks are invalid after a load within a step fails: those not loaded, and all computed from them.

vLLM 0.30 to 0.33 remove from the prefix cache the blocks of the load's own request, if that request is to
fail. Two others may have computed on such a block before the failure is known:

    a request that shares it          its own blocks after it keep their hashes
    a request whose client has left   all its blocks do, and no request holds them any more

A later request with the same tokens would hit these blocks.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable

from vllm.v1.core.kv_cache_manager import KVCacheManager


class InvalidBlocks:
    """Removes them. Keeps the blocks of clients that left while steps may be in flight."""

    def __init__(self, manager: KVCacheManager, steps_under_way: int) -> None:
        self._manager, self._steps_under_way = manager, steps_under_way
        self._ended = 0  # steps
        self._aborted: deque[tuple[int, list[int]]] = deque()

    def on_client_abort(self, request_id: str) -> None:
        """Its blocks are about to be freed."""
        self._aborted.append((self._ended, self._blocks(request_id)))

    def on_step_end(self) -> None:
        """The result of the step's loads is known."""
        self._ended += 1
        while self._aborted and self._aborted[0][0] + self._steps_under_way <= self._ended:
            self._aborted.popleft()

    def mark_invalid(self, invalid_block_ids: set[int], request_ids: Iterable[str]) -> None:
        """Drop the hashes of these requests' blocks from the first invalid one on, and aborted ones'."""
        held = [*map(self._blocks, request_ids), *(blocks for _, blocks in self._aborted)]
        after = (itertools.dropwhile(lambda block: block not in invalid_block_ids, each) for each in held)
        if invalid := set(itertools.chain.from_iterable(after)):
            self._manager.evict_blocks(invalid)

    def _blocks(self, request_id: str) -> list[int]:
        """vLLM reports no failures by block for a model with several KV cache groups."""
        groups: tuple[list[int], ...] = self._manager.get_block_ids(request_id)
        return groups[0] if len(groups) == 1 else []
