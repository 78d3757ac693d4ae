"""Which head of a program's tokens do others use too? What is left behind it dies with the program."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

MOST_HEADS = 4096  # distinct shared heads: system prompts and forks; the longest unused go first


class Commons:
    """Heads that a program's first turn found, so that somebody else had left them there.

    A block's hash stands for everything before it, so the deepest one found stands for the head.
    """

    def __init__(self) -> None:
        self._heads: OrderedDict[Hashable, None] = OrderedDict()

    def found(self, hashes: Sequence[Hashable], blocks: int) -> None:
        """A program's first turn found the KV of its first `blocks` blocks."""
        if 0 < blocks <= len(hashes):
            self._heads[hashes[blocks - 1]] = None
            self._heads.move_to_end(hashes[blocks - 1])
            if len(self._heads) > MOST_HEADS:
                self._heads.popitem(last=False)

    def shared_blocks(self, hashes: Sequence[Hashable]) -> int:
        """How many leading blocks another program has found, 0 to len(hashes)."""
        return next((at for at in range(len(hashes), 0, -1) if hashes[at - 1] in self._heads), 0)
