"""One tier's chunks, least recently used first, and the names of chunks."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

ChunkName = Hashable
"""Names one chunk and all tokens before it: equal names, equal KV."""

Namer = Callable[[Sequence[int], int, str, Sequence[Any]], list[ChunkName]]
"""(token ids, chunk tokens, salt, known names of the first chunks) -> names of all whole chunks."""


def chunk_names(
    token_ids: Sequence[int], chunk_tokens: int, salt: str = "", known: Sequence[Any] = ()
) -> list[ChunkName]:
    """Names of the whole chunks of `token_ids`, each a hash that includes the one before; `known` first."""
    names: list[ChunkName] = list(known)
    parent: bytes = known[-1] if known else salt.encode()
    for start in range(len(names) * chunk_tokens, len(token_ids) - chunk_tokens + 1, chunk_tokens):
        chunk = array("q", token_ids[start : start + chunk_tokens]).tobytes()
        parent = blake2b(parent + chunk, digest_size=16).digest()
        names.append(parent)
    return names


@dataclass(slots=True)
class LruTier:
    """One tier's chunks, next to be evicted first."""

    capacity: float  # in chunks
    names: OrderedDict[ChunkName, None] = field(default_factory=OrderedDict)
    reserved: int = 0  # places reserved for unfinished writes

    def make_room(self, keep: Collection[ChunkName] = ()) -> list[ChunkName] | None:
        """Evict until one more chunk fits, never from `keep`; None if that is impossible."""
        evicted = []
        while len(self.names) + self.reserved + 1 > self.capacity:
            victim = next((n for n in self.names if n not in keep), None)
            if victim is None:
                return None
            del self.names[victim]
            evicted.append(victim)
        return evicted

    def touch(self, hit: Sequence[ChunkName]) -> None:
        """Tail first, so that the head becomes the most recently used."""
        for name in reversed(hit):
            self.names.move_to_end(name)
