"""Links a prompt without a program's name to the finished turn whose tokens it continues.

    a turn's tokens    |-- full blocks, one hash for all --|-- tail, as it is --|

A hash covers all tokens before it, their images and the cache salt (vLLM chains them). The key also has the
API key's owner, so tenants never share a turn. A finished turn is kept with its output and without: an
output may be sent back changed, encoded anew or without its thoughts. The prompt before it comes back
unchanged, except its last tokens: a chat template may open the answer with `<think>`, which no history
repeats.
So a third key ends some tokens before the prompt does, and never where another program's
prompt may continue too. Of a first prompt it ends among the tokens with which the template closes every
prompt: other recent prompts end with them too. They may be a sentence, as a thinking budget's.

A client may cut its last message short afterwards, by a reminder or by what AgentX's harness fills it up
with. So a fourth key ends CUT_TOKENS earlier. It counts only for a prompt that closes the message where it
leaves the turn's: another program's goes on with another text. So may a later turn's of the same hint.

A hint, a name that a client gives to several of its programs, decides where that is ambiguous, as between
two equal first prompts. It links a prompt that continues exactly one turn of that hint.

Turns with a name are linked among those of the same name: several conversations may have it.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, repeat, takewhile
from typing import Any, Protocol

from continuum_lmcache.bounded_dict import BoundedDict
from continuum_lmcache.programs.identity import ProgramFields
from continuum_lmcache.types import ProgramId

MAX_TAILS = 64  # of turns that differ only after a common hash, such as a system prompt's
SUFFIX_TOKENS = 4  # the usual opening of an answer: an empty thought, two tags and two line breaks
UNSTABLE_TOKENS = 64  # at most, at the end of what a turn adds to its history; they may not come back
CUT_TOKENS = 96  # at most, that a message loses: AgentX's harness drops less than 64, and a role's opening
CUT_SLACK_TOKENS = 4  # before the message's end, if text was cut within a word; behind it, if all of it was
MAX_HINTED = 16  # turns of one hint: a session and its subagents
RECENT_PROMPTS = 16  # whose ends show how the template closes a prompt

NO_FIELDS = ProgramFields()

Scope = tuple[str, str | None]  # ProgramFields.scope
Tail = tuple[int | str, ...]  # tokens; an image's are its hash
Key = tuple[Any, Tail]  # the hash and its scope, the tail


class HashedPrompt(Protocol):
    """The attributes of a request that are read: vLLM's `Request` (0.30 to 0.33) has all four."""

    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def all_token_ids(self) -> Sequence[int]: ...
    @property
    def block_hashes(self) -> Sequence[Any]: ...
    @property
    def mm_features(self) -> Sequence[Any]: ...  # images and the like, by their place in the prompt


def tail_of(prompt: HashedPrompt, start: int, end: int) -> Tail:
    """The prompt's tokens of [start, end) as they are; those of an image are its hash."""
    tail: list[int | str] = list(prompt.all_token_ids[start:end])
    for feature in reversed(prompt.mm_features):
        place = feature.mm_position
        if place.offset + place.length <= start:
            break
        for at in range(max(place.offset, start), min(place.offset + place.length, end)):
            tail[at - start] = feature.identifier
    return tuple(tail)


@dataclass(frozen=True, slots=True)
class LinkableTurn:
    program: ProgramId
    arrival_s: float  # the program's
    prompt_tokens: int
    context_tokens: int
    ends: tuple[int, ...]  # the length of each key in tokens
    keys: tuple[Key, ...]  # the shortest first
    hint: tuple[str, str]  # with its owner; the hint "" is none
    is_first: bool = False  # of its program, without a name: others may have the same prompt
    closing_tokens: int = 0  # with which the template ends its prompt, the message's end first
    cut_part: Sequence[int] = field(default=(), repr=False)  # of the prompt, from the first key's end on

    def is_continued_by(self, prompt: HashedPrompt, end: int, has_hint: bool = False) -> bool:
        """Whether a prompt that has the first `end` tokens of this turn is its program's next one: one that
        is longer, or the same again, whose answer its client may not have got. `has_hint`: of this turn."""
        tokens = len(prompt.all_token_ids)
        if tokens < self.prompt_tokens or (tokens == self.prompt_tokens and self.is_first):
            return False
        is_whole = not self.cut_part or end > self.ends[0]
        return is_whole or (has_hint and not self.is_first) or self._is_cut_in(prompt)

    def _is_cut_in(self, prompt: HashedPrompt) -> bool:
        """Whether the prompt closes the turn's last message where it leaves it, before its own end."""
        start, tokens = self.ends[0], prompt.all_token_ids
        part = tokens[start : min(self.prompt_tokens, len(tokens) - self.closing_tokens)]
        same, closing = common_start(self.cut_part, part), list(self.cut_part[-self.closing_tokens :])
        for at in range(max(0, same - CUT_SLACK_TOKENS), min(len(part), same + CUT_SLACK_TOKENS)):
            found = list(part[at : max(at, same) + 1])  # as far as where it leaves the turn's, at least
            if found == closing[: len(found)]:
                return True
        return False


@dataclass(frozen=True, slots=True)
class ProgramLink:
    program: ProgramId
    arrival_s: float  # the program's
    tokens: int  # of the prompt that count as that turn's
    turn: LinkableTurn


class PromptLinker:
    """Finished turns by hash; the oldest are dropped."""

    def __init__(self, max_turns: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens  # covered by one hash
        self._turns: BoundedDict[Any, dict[Tail, LinkableTurn | None]] = BoundedDict(max_turns)
        self._hinted: BoundedDict[tuple[str, str], deque[LinkableTurn]] = BoundedDict(max_turns)  # with owner
        self._endings: BoundedDict[Key, Tail] = BoundedDict(RECENT_PROMPTS)  # of different prompts, reversed
        self.unnamed: Counter[str] = Counter(linked=0, first=0)  # prompts without a name

    def add_turn(
        self,
        request: HashedPrompt,
        program: ProgramId,
        arrival_s: float,
        matched_tokens: int = 0,
        fields: ProgramFields = NO_FIELDS,
    ) -> LinkableTurn:
        """A turn ended. One shorter than a block is not kept; two equal ones are ambiguous.

        `matched_tokens`: those of its ProgramLink, 0 if there was none.
        """
        prompt_tokens = request.num_prompt_tokens
        opening_tokens = self._opening_tokens(request, fields.scope)
        least = prompt_tokens - unstable_suffix(prompt_tokens, matched_tokens, opening_tokens)
        all_ends = sorted({least, prompt_tokens, len(request.all_token_ids)})
        ends = tuple(end for end in all_ends if end >= self._block_tokens)
        cut_at = max(self._block_tokens, prompt_tokens - opening_tokens - CUT_TOKENS)
        may_be_cut = opening_tokens and cut_at < least
        cut_part = compact(tail_of(request, cut_at, prompt_tokens)) if may_be_cut else ()
        if cut_part:
            ends = (cut_at, *ends)
        keys = tuple(self._key(request, end, fields.scope) for end in ends)
        context_tokens, hint = len(request.all_token_ids), (fields.hint, fields.owner)
        is_first = not matched_tokens and fields.job_id is None
        turn = LinkableTurn(
            program,
            arrival_s,
            prompt_tokens,
            context_tokens,
            ends,
            keys,
            hint,
            is_first,
            opening_tokens + 1,
            cut_part,
        )
        self._keep(turn)
        return turn

    def find_link(self, request: HashedPrompt, fields: ProgramFields = NO_FIELDS) -> ProgramLink | None:
        """The longest finished turn that this prompt continues. A turn is continued once: forks begin new
        programs, and so does a repeated first prompt."""
        hint = (fields.hint, fields.owner)
        found = self._extended(request, fields.scope) or self._turn_of_hint(request, hint)
        if fields.job_id is None:
            self.unnamed["linked" if found is not None else "first"] += 1
        return self.take(request, found) if found is not None else None

    def take(self, request: HashedPrompt, turn: LinkableTurn) -> ProgramLink:
        """The prompt continues this turn, and no other prompt does."""
        self._forget(turn)
        has_grown = turn.context_tokens < len(request.all_token_ids)  # else it repeats the prompt at most
        tokens = turn.context_tokens if has_grown else turn.prompt_tokens
        return ProgramLink(turn.program, turn.arrival_s, tokens, turn)

    def put_back(self, link: ProgramLink, program: ProgramId) -> LinkableTurn:
        """The prompt's turn did not end, so its client may send it again, as the program's next turn."""
        turn = replace(link.turn, program=program)
        self._keep(turn)
        return turn

    def _extended(self, request: HashedPrompt, scope: Scope) -> LinkableTurn | None:
        """The longest turn that this prompt alone identifies."""
        hashes, turns = request.block_hashes, self._turns
        are_known = map(turns.__contains__, zip(reversed(hashes), repeat(scope)))
        for blocks in compress(range(len(hashes), 0, -1), are_known):
            found = with_longest_tail(turns[hashes[blocks - 1], scope], request, blocks * self._block_tokens)
            if found is not None:
                return found
        return None

    def _turn_of_hint(self, request: HashedPrompt, hint: tuple[str, str]) -> LinkableTurn | None:
        """The hint's turn that this prompt extends furthest; None also if two are equal."""
        best, reached = None, 0
        for turn in self._hinted.get(hint, ()):
            keys = zip(turn.ends, turn.keys, strict=True)
            repeats = [end for end, key in keys if self._is_prefix_of(request, end, key)]
            if repeats and repeats[-1] >= reached and turn.is_continued_by(request, repeats[-1], True):
                best, reached = (turn if repeats[-1] > reached else None), repeats[-1]
        return best

    def _is_prefix_of(self, request: HashedPrompt, end: int, key: Key) -> bool:
        """Whether the request begins with the `end` tokens of a turn's key."""
        (block_hash, _), tail = key
        blocks = (end - len(tail)) // self._block_tokens
        if blocks > len(request.block_hashes) or request.block_hashes[blocks - 1] != block_hash:
            return False
        return tail_of(request, end - len(tail), end) == tail

    def _mark_ambiguous(self, keys: Sequence[Key]) -> int:
        """How many of a turn's keys, shortest first, another turn has too; they identify neither turn now."""
        equal = 0
        for at, (block_hash, tail) in enumerate(keys, 1):
            tails = self._turns.get(block_hash, {})
            if tail in tails:
                equal = at
                if (older := tails[tail]) is not None:
                    for shorter, its_tail in older.keys[: older.keys.index((block_hash, tail)) + 1]:
                        self._turns.get(shorter, {})[its_tail] = None
        return equal

    def _key(self, request: HashedPrompt, end: int, scope: Scope) -> Key:
        blocks = min(end // self._block_tokens, len(request.block_hashes))
        tail = tail_of(request, blocks * self._block_tokens, end)
        return (request.block_hashes[blocks - 1], scope), tail

    def _opening_tokens(self, request: HashedPrompt, scope: Scope) -> int:
        """How many of the prompt's last tokens may open the answer; 0 if no recent prompt ends alike.

        The fewest tokens that it shares with another prompt's end are the template's, unless all these
        prompts end with one message. The first of them stays: it closes the message.
        """
        prompt_tokens = request.num_prompt_tokens
        if prompt_tokens < self._block_tokens:
            return 0
        prompt = self._key(request, prompt_tokens, scope)
        ending = tail_of(request, max(0, prompt_tokens - UNSTABLE_TOKENS - 1), prompt_tokens)[::-1]
        shared = 0
        for key, other in self._endings.items():
            if key != prompt:
                shared = common_start(ending[: shared or None], other) or shared
        self._endings[prompt] = ending
        return max(shared - 1, 0)

    def _keep(self, turn: LinkableTurn) -> None:
        if turn.hint[0] and turn.keys:
            hinted = self._hinted[turn.hint] = self._hinted.get(turn.hint) or deque(maxlen=MAX_HINTED)
            hinted.append(turn)
        equal = self._mark_ambiguous(turn.keys)
        for at, (block_hash, tail) in enumerate(turn.keys):
            tails = self._turns[block_hash] = self._turns.get(block_hash, {})
            tails[tail] = None if at < equal else turn
            if len(tails) > MAX_TAILS:
                del tails[next(iter(tails))]

    def _forget(self, turn: LinkableTurn) -> None:
        for block_hash, tail in turn.keys:
            tails = self._turns.get(block_hash, {})
            if tails.get(tail) is turn:
                del tails[tail]
            if not tails:
                self._turns.pop(block_hash, None)
        if (hinted := self._hinted.get(turn.hint)) and turn in hinted:
            hinted.remove(turn)
            if not hinted:
                del self._hinted[turn.hint]

    def __len__(self) -> int:
        return len(self._turns)


def unstable_suffix(prompt_tokens: int, matched_tokens: int, opening_tokens: int) -> int:
    """How many of a prompt's last tokens may not come back.

    After a first prompt only the answer's opening may change: other programs send the same system prompt.
    Later at most half of the tokens that the prompt added, or the opening: forks send the same history.
    """
    if not matched_tokens:
        return opening_tokens
    new_tokens = prompt_tokens - matched_tokens
    opening_tokens = min(max(SUFFIX_TOKENS, opening_tokens), new_tokens - 1)
    return max(opening_tokens, min(UNSTABLE_TOKENS, new_tokens // 2))


def compact(tokens: Tail) -> Sequence[int]:
    """The tokens in four bytes each; none where an image is among them."""
    try:
        return array("i", tokens)  # type: ignore[arg-type]
    except TypeError:
        return ()


def common_start(one: Sequence[int | str], other: Sequence[int | str]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def with_longest_tail(
    tails: dict[Tail, LinkableTurn | None], prompt: HashedPrompt, at: int
) -> LinkableTurn | None:
    """The turn with the longest tail that is in the prompt at `at`, and that it may continue; None also where
    it is ambiguous."""
    tokens = len(prompt.all_token_ids)
    for tail in sorted(tails, key=len, reverse=True):
        turn, end = tails[tail], at + len(tail)
        is_there = end <= tokens and tail_of(prompt, at, end) == tail
        if is_there and (end < tokens if turn is None else turn.is_continued_by(prompt, end)):
            return turn
    return None
