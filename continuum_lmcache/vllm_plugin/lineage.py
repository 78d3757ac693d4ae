"""Programs of clients that name none: the new prompt extends the tokens of a finished turn.

    a turn's tokens    |-- full blocks, one hash for all --|-- tail, as it is --|

A hash stands for everything before it and for the cache salt (vLLM chains them), so tenants never
meet. A finished turn is remembered twice, with its output and without: an output may come back
changed, encoded anew or without its thoughts, but the prompt before it comes back as it was.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from continuum_lmcache.types import ProgramId

MAX_TAILS = 64  # of turns that differ only behind a common hash, such as a system prompt's

Key = tuple[Any, tuple[int, ...]]  # the hash, the tail


@dataclass(frozen=True, slots=True)
class Ancestor:
    """A finished turn that may be continued."""

    program: ProgramId
    arrival_s: float  # the program's
    keys: tuple[Key, ...]


class Lineage:
    """Finished turns by hash; the oldest are forgotten."""

    def __init__(self, max_turns: int, block_tokens: int) -> None:
        self._max_hashes = max_turns
        self._block_tokens = block_tokens  # that one hash adds
        self._turns: OrderedDict[Any, dict[tuple[int, ...], Ancestor | None]] = OrderedDict()

    def finished(self, request: Any, program: ProgramId, arrival_s: float) -> None:
        """A turn ended. One shorter than a block leaves nothing; two that are equal leave nothing certain."""
        ends = {request.num_prompt_tokens, len(request.all_token_ids)}
        keys = tuple(self._key(request, end) for end in sorted(ends) if end >= self._block_tokens)
        ancestor = Ancestor(program, arrival_s, keys)
        for block_hash, tail in keys:
            tails = self._turns.setdefault(block_hash, {})
            self._turns.move_to_end(block_hash)
            tails[tail] = None if tail in tails else ancestor
            if len(tails) > MAX_TAILS:
                del tails[next(iter(tails))]
        while len(self._turns) > self._max_hashes:
            self._turns.popitem(last=False)

    def ancestor(self, request: Any) -> Ancestor | None:
        """The longest finished turn that this prompt extends. A turn is continued once: forks start anew."""
        for blocks in range(len(request.block_hashes), 0, -1):
            tails = self._turns.get(request.block_hashes[blocks - 1])
            if tails is not None:
                found = longest(tails, request.all_token_ids, blocks * self._block_tokens)
                if found is not None:
                    self._forget(found)
                    return found
        return None

    def _key(self, request: Any, end: int) -> Key:
        blocks = min(end // self._block_tokens, len(request.block_hashes))
        return request.block_hashes[blocks - 1], tuple(
            request.all_token_ids[blocks * self._block_tokens : end]
        )

    def _forget(self, ancestor: Ancestor) -> None:
        for block_hash, tail in ancestor.keys:
            tails = self._turns.get(block_hash, {})
            if tails.get(tail) is ancestor:
                del tails[tail]
            if not tails:
                self._turns.pop(block_hash, None)

    def __len__(self) -> int:
        return len(self._turns)


def longest(tails: dict[tuple[int, ...], Ancestor | None], tokens: Sequence[int], at: int) -> Ancestor | None:
    """The longest of these turns whose tail stands in `tokens` at `at`, with more behind it."""
    for tail in sorted(tails, key=len, reverse=True):
        end = at + len(tail)
        if end < len(tokens) and tuple(tokens[at:end]) == tail:
            return tails[tail]
    return None
