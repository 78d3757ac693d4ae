"""Finds the head of a program's tokens that others use too. It takes memory once and outlives the program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from continuum_lmcache.bounded_dict import BoundedDict

MOST_HEADS = 1024  # distinct shared heads: system prompts and forks; the longest unused are dropped first


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The first tokens of a prompt that other programs have too."""

    last_hash: Hashable = None  # of its last block
    tokens: int = 0


NO_HEAD = SharedPrefix()


class SharedPrefixIndex:
    """Heads that a program's first turn found in the cache, so another program has them too.

    A block's hash covers all tokens before it, so the deepest found hash identifies the head.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens  # covered by one hash
        self._heads: BoundedDict[Hashable, int] = BoundedDict(MOST_HEADS)  # blocks
        self._depths: list[int] = []  # of heads, the deepest first; some may have been forgotten

    def record_hit(self, hashes: Sequence[Hashable], tokens: int) -> None:
        """A program's first turn found the KV of its first `tokens`."""
        blocks = tokens // self._block_tokens
        if 0 < blocks <= len(hashes):
            self._heads[hashes[blocks - 1]] = blocks
            if blocks not in self._depths:
                self._depths = sorted(set(self._heads.values()), reverse=True)

    def head(self, hashes: Sequence[Hashable]) -> SharedPrefix:
        """The longest head that another program has found; without tokens if there is none."""
        for blocks in self._depths:
            if blocks <= len(hashes) and (last := hashes[blocks - 1]) in self._heads:
                return SharedPrefix(last, blocks * self._block_tokens)
        return NO_HEAD


class SharedPrefixesInUse:
    """The heads of present programs: each takes memory once, however many programs begin with it.

    Of two heads, one within the other, both count whole: programs that continue the shorter one keep it.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._users: Counter[SharedPrefix] = Counter()

    def __contains__(self, head: SharedPrefix) -> bool:
        return head in self._users

    def take(self, head: SharedPrefix) -> None:
        if not head.tokens:
            return
        self.tokens += 0 if head in self._users else head.tokens
        self._users[head] += 1

    def release(self, head: SharedPrefix) -> None:
        if not head.tokens:
            return
        self._users[head] -= 1
        if not self._users[head]:
            del self._users[head]
            self.tokens -= head.tokens
