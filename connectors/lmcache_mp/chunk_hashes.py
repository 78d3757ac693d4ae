"""Hashes of a prompt's chunks, as LMCache names them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from continuum_lmcache.bounded_dict import BoundedDict

MEMO_CHUNKS = 65_536  # chunk hashes remembered, about 12 MB


class ChunkHashes:
    """LMCache's own chunk hashes, cached: to hash 8k tokens takes a millisecond.

    `first`: the hash before the first chunk. `extend`: that of a chunk's tokens after another hash.
    The cache's key is Python's hash of a chunk's tokens and the hash before it. A collision gives a
    wrong estimate of where KV is, never wrong KV: LMCache computes its own hashes.
    """

    def __init__(
        self, first: Callable[[], Any], extend: Callable[[list[int], Any], Any], chunk_tokens: int
    ) -> None:
        self._first, self._extend, self._chunk_tokens = first, extend, chunk_tokens
        self._memo: BoundedDict[tuple[int, int], int] = BoundedDict(MEMO_CHUNKS)

    def of(self, token_ids: Sequence[int]) -> Iterator[int]:
        """The hash of each full chunk, lazily, head first."""
        before = self._first()
        for start in range(0, len(token_ids) - self._chunk_tokens + 1, self._chunk_tokens):
            chunk = token_ids[start : start + self._chunk_tokens]
            key = (before, hash(tuple(chunk)))
            found = self._memo.get(key)
            if found is None:
                found = self._memo[key] = self._extend(list(chunk), before)
            before = found
            yield found
