"""What a program that comes back has lost of the turn that it left, where, and why.

    the last turn    |-- the same --|-- taken out --|-- the same again, or not
    the next prompt  |-- the same --|-- put in --|-- the same again, or not
                                    at_token

Behind `at_token` no cache can help: a block's hash stands for all tokens before it too. What is before it,
and neither on the GPU nor in a tier any more, was lost by them. Hashes are compared, by halves; tokens only
in the block where they part, and around it where more is lost than a block at either end.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from continuum_lmcache.reload.cost_model import PrefillCurve

FEW_TOKENS = 64  # what a client puts new into each prompt: a hash, a time
EMPTY_THOUGHT_TOKENS = 8  # what a template puts where a thought was
THOUGHT_TOKENS = 16_384  # the longest thought that is looked for
SAME_AGAIN_TOKENS = 8  # so many equal tokens are no accident
SUFFIX_TOKENS = 4  # of a prompt, the opening of an answer, which no history repeats
COMPACT = 0.75  # of the last turn's length, at most, is a history that was made shorter
LEAST_HEAD = 0.05  # of a prompt that must be the same, or it is another prompt and no shorter history
SIDE_TOKENS = 16  # of either side, for who wants to see what stood there


class LossCause(Enum):
    """Why a program came back to less than it left. These are metric labels."""

    SALT = "salt"  # the same tokens, but another cache_salt, adapter or image
    THOUGHTS = "thoughts"  # the chat template left out what the model had thought
    ANSWER = "answer"  # the last answer came back changed
    TOOLS = "tools"  # the client offers other tools
    NONCE = "nonce"  # a few tokens are others, and what follows is the same
    COMPACTION = "compaction"  # the client made the history shorter
    OTHER = "other"  # another prompt, or a history that was edited
    EVICTED = "evicted"  # the GPU lost it, and no tier had it
    TIER_MISS = "tier-miss"  # a tier had it when the turn ended, and not at the return


@dataclass(frozen=True, slots=True)
class EndedTurn:
    """A turn that ended while its program goes on."""

    name: str  # of its program
    tokens: Sequence[int]  # prompt and output
    hashes: Sequence[Hashable]  # of the whole blocks
    prompt_tokens: int
    tools: str  # a digest of the tools that were offered; "": none
    thought: bool  # the answer has a thought
    tier_tokens: int = 0  # that the tiers held


@dataclass(frozen=True, slots=True)
class PromptEdit:
    """What was taken out of the last turn, and put in instead, up to where both are the same again."""

    taken_tokens: int
    put_tokens: int


@dataclass(frozen=True, slots=True)
class LossEvidence:
    """What tells one cause from another where a prompt parts from the last turn."""

    at_token: int
    left_prompt_tokens: int
    left_tokens: int  # of the last turn
    now_tokens: int  # of the prompt
    same_tokens_follow: bool  # with other hashes
    other_tools: bool
    thought: bool
    edit: PromptEdit | None = None


@dataclass(frozen=True, slots=True)
class Divergence:
    """How far a prompt goes along with the turn that its program left."""

    at_token: int
    left_tokens: int
    kept_tokens: int  # whole blocks that both begin with
    tier_tokens: int
    cause: LossCause | None = None  # None: it repeats all
    again_tokens: int = 0  # behind at_token, that the last turn had too and are computed again, at most
    left_side: tuple[int, ...] = ()  # what stood at at_token, and stands there now
    now_side: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefixLoss:
    """What one return computes again, and why."""

    cause: LossCause
    at_token: int  # from where on
    left_tokens: int  # of the turn before
    tokens: int
    seconds: float  # of prefill
    left_side: tuple[int, ...] = ()
    now_side: tuple[int, ...] = ()


def divergence_of(
    left: EndedTurn, tokens: Sequence[int], tools: str, kept_tokens: int, block_tokens: int
) -> Divergence:
    """Where a prompt parts from a turn, behind what their hashes say is the same, and why."""
    end = min(len(left.tokens), len(tokens))
    block_end = min(kept_tokens + block_tokens, end)
    at = kept_tokens
    while at < block_end and left.tokens[at] == tokens[at]:
        at += 1
    same_tokens_follow = at == kept_tokens + block_tokens
    at = kept_tokens if same_tokens_follow else at
    found = Divergence(at, len(left.tokens), kept_tokens, left.tier_tokens)
    if len(left.tokens) - at <= 2 * block_tokens or at == len(tokens):
        return found
    edit = edited(left.tokens, tokens, at)
    other_tools = bool(tools and left.tools and tools != left.tools)
    sizes = (left.prompt_tokens, len(left.tokens), len(tokens))
    seen = LossEvidence(at, *sizes, same_tokens_follow, other_tools, left.thought, edit)
    taken, put = (edit.taken_tokens, edit.put_tokens) if edit else (0, 0)
    return replace(
        found,
        cause=cause_of(seen),
        again_tokens=max(0, min(len(left.tokens) - at - taken, len(tokens) - at - put)),
        left_side=tuple(left.tokens[at : at + SIDE_TOKENS]),
        now_side=tuple(tokens[at : at + SIDE_TOKENS]),
    )


def cause_of(seen: LossEvidence) -> LossCause:
    """Why a prompt parts from the last turn."""
    edit = seen.edit or PromptEdit(0, 0)
    is_left_out = edit.taken_tokens > edit.put_tokens and edit.put_tokens <= EMPTY_THOUGHT_TOKENS
    is_few = 0 < edit.put_tokens <= FEW_TOKENS and edit.taken_tokens <= FEW_TOKENS
    if seen.same_tokens_follow:
        return LossCause.SALT
    if seen.at_token >= seen.left_prompt_tokens - SUFFIX_TOKENS:
        return LossCause.THOUGHTS if seen.thought or is_left_out else LossCause.ANSWER
    if seen.other_tools:
        return LossCause.TOOLS
    if is_few:
        return LossCause.NONCE
    if is_left_out:
        return LossCause.THOUGHTS
    is_shorter = seen.now_tokens <= COMPACT * seen.left_tokens
    return (
        LossCause.COMPACTION
        if is_shorter and seen.at_token >= LEAST_HEAD * seen.now_tokens
        else LossCause.OTHER
    )


def losses_of(
    parted: Divergence, found_tokens: int, is_declined: bool, slack_tokens: int, curve: PrefillCurve
) -> Iterator[PrefixLoss]:
    """What a return lost by its prompt, and what of the rest neither the GPU nor a tier had."""
    if parted.cause is not None:
        seconds = curve.seconds(parted.again_tokens, parted.at_token) - curve.fixed_s
        sides = (parted.left_side, parted.now_side)
        yield PrefixLoss(
            parted.cause, parted.at_token, parted.left_tokens, parted.again_tokens, max(0.0, seconds), *sides
        )
    gone_tokens = parted.kept_tokens - found_tokens
    if gone_tokens > slack_tokens:
        missed = not is_declined and min(parted.tier_tokens, parted.kept_tokens) - found_tokens > slack_tokens
        seconds = curve.seconds(gone_tokens, found_tokens) - curve.fixed_s
        cause = LossCause.TIER_MISS if missed else LossCause.EVICTED
        yield PrefixLoss(cause, found_tokens, parted.left_tokens, gone_tokens, max(0.0, seconds))


def same_blocks(left: Sequence[Hashable], now: Sequence[Hashable]) -> int:
    """How many whole blocks two contexts begin with alike: each hash stands for all blocks up to it."""
    low, high = 0, min(len(left), len(now))
    while low < high:
        middle = (low + high + 1) // 2
        if left[middle - 1] == now[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def edited(left: Sequence[int], now: Sequence[int], at: int) -> PromptEdit | None:
    """What was taken out and put in at `at`: a few tokens for a few, or little for a thought."""
    return replaced(left, now, at, FEW_TOKENS, FEW_TOKENS) or replaced(
        left, now, at, THOUGHT_TOKENS, EMPTY_THOUGHT_TOKENS
    )


def replaced(
    left: Sequence[int], now: Sequence[int], at: int, most_taken: int, most_put: int
) -> PromptEdit | None:
    """The edit within these bounds that puts in the least. Found as bytes: C looks through them."""
    behind = array("i", left[at : at + most_taken + SAME_AGAIN_TOKENS])
    instead = array("i", now[at : at + most_put + SAME_AGAIN_TOKENS])
    text, size_bytes = behind.tobytes(), behind.itemsize
    for put in range(len(instead) - SAME_AGAIN_TOKENS + 1):
        place = text.find(instead[put : put + SAME_AGAIN_TOKENS].tobytes())
        if place >= 0 and place % size_bytes == 0:  # else it is no token's: as good as none
            return PromptEdit(place // size_bytes, put)
    return None
