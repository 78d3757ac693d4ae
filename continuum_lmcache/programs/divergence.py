"""What a returning program has lost of its last turn: at which token, and why.

    the last turn    |-- the same --|-- removed ---|-- the same again, or not
    the next prompt  |-- the same --|-- inserted --|-- the same again, or not
                                    at_token

After `at_token` no cache can help, since a block's hash covers all tokens before it. Tokens before it that
are neither on the GPU nor in a tier were evicted. Hashes are compared by bisection. Tokens are compared
only in the first differing block, and around it where more than a block at either end is lost.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from continuum_lmcache.reload.cost_model import PrefillCurve
from continuum_lmcache.tools.call_parser import without_thinking

UNREAD, PLAIN, THOUGHT = "unread", "plain", "thought"  # a turn's end: not known, no thought, a thought
FEW_TOKENS = 64  # a client's short new text in each prompt: a hash, a time
EMPTY_THOUGHT_TOKENS = 8  # what a template puts in place of a thought
THOUGHT_TOKENS = 16_384  # the longest thought that is searched for
MATCH_TOKENS = 8  # this many equal tokens are no coincidence
SUFFIX_TOKENS = 4  # at a prompt's end: the opening of an answer, which no history repeats
COMPACTED_SHARE = 0.75  # at most this share of the last turn's length is a shortened history
LEAST_EQUAL_SHARE = 0.05  # of a prompt that must be equal, or it is another prompt, not a shorter history
EXCERPT_TOKENS = 16  # of the last turn and of the prompt, to show where they differ


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

    removed_tokens: int
    inserted_tokens: int


@dataclass(frozen=True, slots=True)
class LossEvidence:
    """The evidence for a cause, where a prompt differs from the last turn."""

    at_token: int
    last_prompt_tokens: int
    last_turn_tokens: int
    next_prompt_tokens: int
    same_tokens_follow: bool  # with other hashes
    other_tools: bool
    thought: bool
    edit: PromptEdit | None = None


@dataclass(frozen=True, slots=True)
class Divergence:
    """How far a prompt repeats its program's last turn."""

    at_token: int
    kind: TurnKind  # of the last turn
    last_prompt_tokens: int
    last_turn_tokens: int  # its prompt and output
    equal_tokens: int  # whole blocks at the beginning of both
    tier_tokens: int
    cause: LossCause | None = None  # None: it repeats all
    recomputed_tokens: int = 0  # after at_token, in the last turn too, and computed again, at most
    last_turn_excerpt: tuple[int, ...] = ()  # its tokens from at_token on
    prompt_excerpt: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefixLoss:
    """What one return computes again, and why."""

    cause: LossCause
    at_token: int  # the first lost token
    last_turn_tokens: int
    tokens: int
    seconds: float  # of prefill
    last_turn_excerpt: tuple[int, ...] = ()
    prompt_excerpt: tuple[int, ...] = ()


def divergence_of(
    last: EndedTurn, tokens: Sequence[int], tools: str, equal_tokens: int, block_tokens: int
) -> Divergence:
    """Where and why a prompt differs from a turn, after the tokens with equal hashes."""
    end = min(len(last.tokens), len(tokens))
    block_end = min(equal_tokens + block_tokens, end)
    at = equal_tokens
    while at < block_end and last.tokens[at] == tokens[at]:
        at += 1
    same_tokens_follow = at == equal_tokens + block_tokens
    at = equal_tokens if same_tokens_follow else at
    sizes = (last.prompt_tokens, len(last.tokens))
    found = Divergence(at, last.kind, *sizes, equal_tokens, last.tier_tokens)
    if len(last.tokens) - at <= 2 * block_tokens or at == len(tokens):
        return found
    edit = find_edit(last.tokens, tokens, at)
    other_tools = bool(tools and last.tools and tools != last.tools)
    has_thought = last.kind.ending == THOUGHT
    seen = LossEvidence(at, *sizes, len(tokens), same_tokens_follow, other_tools, has_thought, edit)
    removed, inserted = (edit.removed_tokens, edit.inserted_tokens) if edit else (0, 0)
    return replace(
        found,
        cause=cause_of(seen),
        recomputed_tokens=max(0, min(len(last.tokens) - at - removed, len(tokens) - at - inserted)),
        last_turn_excerpt=tuple(last.tokens[at : at + EXCERPT_TOKENS]),
        prompt_excerpt=tuple(tokens[at : at + EXCERPT_TOKENS]),
    )


def cause_of(seen: LossEvidence) -> LossCause:
    """Why a prompt differs from the last turn."""
    edit = seen.edit or PromptEdit(0, 0)
    is_removal = edit.removed_tokens > edit.inserted_tokens and edit.inserted_tokens <= EMPTY_THOUGHT_TOKENS
    is_short = 0 < edit.inserted_tokens <= FEW_TOKENS and edit.removed_tokens <= FEW_TOKENS
    if seen.same_tokens_follow:
        return LossCause.SALT
    if seen.at_token >= seen.last_prompt_tokens - SUFFIX_TOKENS:
        return LossCause.THOUGHTS if seen.thought or is_removal else LossCause.ANSWER
    if seen.other_tools:
        return LossCause.TOOLS
    if is_short:
        return LossCause.NONCE
    if is_removal:
        return LossCause.THOUGHTS
    is_shorter = seen.next_prompt_tokens <= COMPACTED_SHARE * seen.last_turn_tokens
    return (
        LossCause.COMPACTION
        if is_shorter and seen.at_token >= LEAST_EQUAL_SHARE * seen.next_prompt_tokens
        else LossCause.OTHER
    )


def losses_of(
    divergence: Divergence, found_tokens: int, is_declined: bool, slack_tokens: int, curve: PrefillCurve
) -> Iterator[PrefixLoss]:
    """What a return lost by its prompt, and what of the rest neither the GPU nor a tier had."""
    if divergence.cause is not None:
        at, tokens = divergence.at_token, divergence.recomputed_tokens
        seconds = max(0.0, curve.seconds(tokens, at) - curve.fixed_s)
        excerpts = (divergence.last_turn_excerpt, divergence.prompt_excerpt)
        yield PrefixLoss(divergence.cause, at, divergence.last_turn_tokens, tokens, seconds, *excerpts)
    missing_tokens = divergence.equal_tokens - found_tokens
    if missing_tokens > slack_tokens:
        held_tokens = min(divergence.tier_tokens, divergence.equal_tokens)
        missed = not is_declined and held_tokens - found_tokens > slack_tokens
        seconds = curve.seconds(missing_tokens, found_tokens) - curve.fixed_s
        cause = LossCause.TIER_MISS if missed else LossCause.EVICTED
        yield PrefixLoss(cause, found_tokens, divergence.last_turn_tokens, missing_tokens, max(0.0, seconds))


def ending_of(text: str) -> str:
    """How a turn with this text ended: templates drop thoughts, and keep plain answers."""
    if not text:
        return UNREAD
    return PLAIN if without_thinking(text) == text else THOUGHT


def same_blocks(last: Sequence[Hashable], prompt: Sequence[Hashable]) -> int:
    """How many whole blocks two contexts have in common: each hash covers all blocks up to it."""
    both = range(min(len(last), len(prompt)))
    return bisect_left(both, True, key=lambda block: last[block] != prompt[block])


def find_edit(last: Sequence[int], prompt: Sequence[int], at: int) -> PromptEdit | None:
    """What was removed and inserted at `at`: a few tokens for a few, or a few for a thought."""
    return find_edit_within(last, prompt, at, FEW_TOKENS, FEW_TOKENS) or find_edit_within(
        last, prompt, at, THOUGHT_TOKENS, EMPTY_THOUGHT_TOKENS
    )


def find_edit_within(
    last: Sequence[int], prompt: Sequence[int], at: int, most_removed: int, most_inserted: int
) -> PromptEdit | None:
    """The edit within these bounds that inserts the least. The search runs on bytes, in C."""
    old = array("i", last[at : at + most_removed + MATCH_TOKENS])
    new = array("i", prompt[at : at + most_inserted + MATCH_TOKENS])
    text, size_bytes = old.tobytes(), old.itemsize
    for inserted in range(len(new) - MATCH_TOKENS + 1):
        wanted = new[inserted : inserted + MATCH_TOKENS].tobytes()
        place = text.find(wanted)
        while place >= 0 and place % size_bytes:  # between two tokens
            place = text.find(wanted, place + 1)
        if place >= 0:
            return PromptEdit(place // size_bytes, inserted)
    return None
