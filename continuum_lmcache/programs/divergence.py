"""What a returning program has lost of its last turn: at which token, and why.

    the last turn    |-- the same --|-- taken out --|-- the same again, or not
    the next prompt  |-- the same --|-- put in --|-- the same again, or not
                                    at_token

After `at_token` no cache can help, since a block's hash covers all tokens before it. Tokens before it that
are neither on the GPU nor in a tier were evicted. Hashes are compared by bisection. Tokens are compared
only in the first differing block, and around it where more than a block at either end is lost.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from continuum_lmcache.reload.cost_model import PrefillCurve

UNREAD, PLAIN, THOUGHT = "unread", "plain", "thought"  # how a turn ended: with a thought, without, not known
FEW_TOKENS = 64  # a client's short new text in each prompt: a hash, a time
EMPTY_THOUGHT_TOKENS = 8  # what a template puts in place of a thought
THOUGHT_TOKENS = 16_384  # the longest thought that is searched for
SAME_AGAIN_TOKENS = 8  # this many equal tokens are no coincidence
SUFFIX_TOKENS = 4  # at a prompt's end: the opening of an answer, which no history repeats
COMPACT = 0.75  # at most this share of the last turn's length is a shortened history
LEAST_HEAD = 0.05  # of a prompt that must be equal, or it is another prompt, not a shorter history
SIDE_TOKENS = 16  # of either side, to show what was there


class LossCause(Enum):
    """Why a returning program lost a part of its prefix. These are metric labels."""

    SALT = "salt"  # the same tokens, but another cache_salt, adapter or image
    THOUGHTS = "thoughts"  # the chat template left out the model's thoughts
    ANSWER = "answer"  # the last answer was sent back changed
    TOOLS = "tools"  # the client offers other tools
    NONCE = "nonce"  # a few tokens differ, and what follows is the same
    COMPACTION = "compaction"  # the client made the history shorter
    OTHER = "other"  # another prompt, or an edited history
    EVICTED = "evicted"  # the GPU lost it, and no tier had it
    TIER_MISS = "tier-miss"  # a tier had it when the turn ended, but not at the return


class TurnKind(NamedTuple):
    """Turns whose next prompts are alike in what they repeat."""

    tenant: str  # it can mislead only itself
    ending: str  # UNREAD, PLAIN or THOUGHT


@dataclass(frozen=True, slots=True)
class EndedTurn:
    """A turn that ended while its program continues."""

    name: str  # of its program
    tokens: Sequence[int]  # prompt and output
    hashes: Sequence[Hashable]  # of the whole blocks
    prompt_tokens: int
    tools: str  # a digest of the offered tools; "": none
    kind: TurnKind
    tier_tokens: int = 0  # the tokens in the tiers


@dataclass(frozen=True, slots=True)
class PromptEdit:
    """What was removed from the last turn and what replaces it, up to where both are equal again."""

    taken_tokens: int
    put_tokens: int


@dataclass(frozen=True, slots=True)
class LossEvidence:
    """The evidence for a cause, where a prompt differs from the last turn."""

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
    """How far a prompt repeats the turn that its program left."""

    at_token: int
    kind: TurnKind  # of that turn
    left_prompt_tokens: int
    left_tokens: int  # its prompt and output
    kept_tokens: int  # whole blocks at the beginning of both
    tier_tokens: int
    cause: LossCause | None = None  # None: it repeats all
    again_tokens: int = 0  # after at_token, in the last turn too, and computed again, at most
    left_side: tuple[int, ...] = ()  # the tokens at at_token, before and now
    now_side: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefixLoss:
    """What one return computes again, and why."""

    cause: LossCause
    at_token: int  # the first lost token
    left_tokens: int  # of the turn before
    tokens: int
    seconds: float  # of prefill
    left_side: tuple[int, ...] = ()
    now_side: tuple[int, ...] = ()


def divergence_of(
    left: EndedTurn, tokens: Sequence[int], tools: str, kept_tokens: int, block_tokens: int
) -> Divergence:
    """Where and why a prompt differs from a turn, after the tokens with equal hashes."""
    end = min(len(left.tokens), len(tokens))
    block_end = min(kept_tokens + block_tokens, end)
    at = kept_tokens
    while at < block_end and left.tokens[at] == tokens[at]:
        at += 1
    same_tokens_follow = at == kept_tokens + block_tokens
    at = kept_tokens if same_tokens_follow else at
    sizes = (left.prompt_tokens, len(left.tokens))
    found = Divergence(at, left.kind, *sizes, kept_tokens, left.tier_tokens)
    if len(left.tokens) - at <= 2 * block_tokens or at == len(tokens):
        return found
    edit = edited(left.tokens, tokens, at)
    other_tools = bool(tools and left.tools and tools != left.tools)
    has_thought = left.kind.ending == THOUGHT
    seen = LossEvidence(at, *sizes, len(tokens), same_tokens_follow, other_tools, has_thought, edit)
    taken, put = (edit.taken_tokens, edit.put_tokens) if edit else (0, 0)
    return replace(
        found,
        cause=cause_of(seen),
        again_tokens=max(0, min(len(left.tokens) - at - taken, len(tokens) - at - put)),
        left_side=tuple(left.tokens[at : at + SIDE_TOKENS]),
        now_side=tuple(tokens[at : at + SIDE_TOKENS]),
    )


def cause_of(seen: LossEvidence) -> LossCause:
    """Why a prompt differs from the last turn."""
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
    divergence: Divergence, found_tokens: int, is_declined: bool, slack_tokens: int, curve: PrefillCurve
) -> Iterator[PrefixLoss]:
    """What a return lost by its prompt, and what of the rest neither the GPU nor a tier had."""
    if divergence.cause is not None:
        seconds = curve.seconds(divergence.again_tokens, divergence.at_token) - curve.fixed_s
        sides = (divergence.left_side, divergence.now_side)
        yield PrefixLoss(
            divergence.cause,
            divergence.at_token,
            divergence.left_tokens,
            divergence.again_tokens,
            max(0.0, seconds),
            *sides,
        )
    gone_tokens = divergence.kept_tokens - found_tokens
    if gone_tokens > slack_tokens:
        missed = (
            not is_declined
            and min(divergence.tier_tokens, divergence.kept_tokens) - found_tokens > slack_tokens
        )
        seconds = curve.seconds(gone_tokens, found_tokens) - curve.fixed_s
        cause = LossCause.TIER_MISS if missed else LossCause.EVICTED
        yield PrefixLoss(cause, found_tokens, divergence.left_tokens, gone_tokens, max(0.0, seconds))


def same_blocks(left: Sequence[Hashable], now: Sequence[Hashable]) -> int:
    """How many whole blocks two contexts have in common: each hash covers all blocks up to it."""
    low, high = 0, min(len(left), len(now))
    while low < high:
        middle = (low + high + 1) // 2
        if left[middle - 1] == now[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def edited(left: Sequence[int], now: Sequence[int], at: int) -> PromptEdit | None:
    """What was removed and inserted at `at`: a few tokens for a few, or a few for a thought."""
    return replaced(left, now, at, FEW_TOKENS, FEW_TOKENS) or replaced(
        left, now, at, THOUGHT_TOKENS, EMPTY_THOUGHT_TOKENS
    )


def replaced(
    left: Sequence[int], now: Sequence[int], at: int, most_taken: int, most_put: int
) -> PromptEdit | None:
    """The edit within these bounds that inserts the least. The search runs on bytes, in C."""
    behind = array("i", left[at : at + most_taken + SAME_AGAIN_TOKENS])
    instead = array("i", now[at : at + most_put + SAME_AGAIN_TOKENS])
    text, size_bytes = behind.tobytes(), behind.itemsize
    for put in range(len(instead) - SAME_AGAIN_TOKENS + 1):
        place = text.find(instead[put : put + SAME_AGAIN_TOKENS].tobytes())
        if place >= 0 and place % size_bytes == 0:  # else it is not at a token's boundary
            return PromptEdit(place // size_bytes, put)
    return None
