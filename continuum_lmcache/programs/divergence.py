"""Where a returning program's prompt first differs from its last turn, and what that costs.

    the last turn    |-- the same blocks --|-- other blocks --|
    the next prompt  |-- the same blocks --|-- other blocks ------|
    found            |-- evicted ->|       |-- changed ->

vLLM's hash of a block covers all tokens before it, so no cache can help after the first different block.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from continuum_lmcache.programs.prompt_linker import HashedPrompt

SLACK_BLOCKS = 2  # a partial block at either end is not lost
THIRDS = ("first", "middle", "last")


class LossCause(Enum):
    """Why a returning program lost a part of its prefix."""

    EVICTED = "evicted"  # the prompt repeats it, and neither the GPU nor a tier gave it back
    CHANGED = "changed"  # the prompt is another one from there on


@dataclass(frozen=True, slots=True)
class PrefixLoss:
    """KV that a program's last turn left, and that its next prompt computes again."""

    cause: LossCause
    at_token: int  # the first lost one
    tokens: int  # at most
    context_tokens: int  # of the last turn

    @property
    def third(self) -> str:
        """The third of the last turn in which the loss begins: one of THIRDS."""
        return THIRDS[min(2, 3 * self.at_token // self.context_tokens)]


def losses_of(
    last: Sequence[int], prompt: HashedPrompt, block_tokens: int, context_tokens: int, found_tokens: int
) -> Iterator[PrefixLoss]:
    """What a prompt lost of its program's last turn; nothing if no hashes of that are kept.

    `last`: the turn's hashes (`kept_hashes`); each covers `block_tokens`, as the prompt's do.
    `context_tokens`: the turn's prompt and output. `found_tokens`: of the prompt, on the GPU or loaded.
    """
    blocks, slack_tokens = same_blocks(last, prompt.block_hashes), SLACK_BLOCKS * block_tokens
    same_tokens = blocks * block_tokens
    if same_tokens - found_tokens > slack_tokens:
        yield PrefixLoss(LossCause.EVICTED, found_tokens, same_tokens - found_tokens, context_tokens)
    if found_tokens - same_tokens > slack_tokens:  # it continues an older turn, as after a title's request
        return
    changed_tokens = min(context_tokens, prompt.num_prompt_tokens) - same_tokens
    if blocks < min(len(last), len(prompt.block_hashes)) and changed_tokens > slack_tokens:
        yield PrefixLoss(LossCause.CHANGED, same_tokens, changed_tokens, context_tokens)


def no_hashes() -> array[int]:
    return array("q")


def kept_hashes(before: array[int], hashes: Sequence[Hashable]) -> array[int]:
    """A turn's block hashes in eight bytes each, those that the turn `before` had too copied from it."""
    same = same_blocks(before, hashes)
    return before[:same] + array("q", map(hash, hashes[same:]))


def same_blocks(last: Sequence[int], prompt: Sequence[Hashable]) -> int:
    """How many whole blocks two contexts have in common, by bisection."""
    both = range(min(len(last), len(prompt)))
    return bisect_left(both, True, key=lambda block: last[block] != hash(prompt[block]))
