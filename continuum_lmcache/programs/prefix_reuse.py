"""How much of a finished turn the program's next prompt repeats, learned from every return.

    the turn          |-- prompt --------------|-- output ------|
    the next prompt   |-- the same ---------------|  something else

A chat template may drop the model's thoughts, and a client may encode an answer anew. KV after
the first difference is never used again. With few returns the whole turn is expected
to be repeated.

Whole blocks are compared, by their hashes, which cover all tokens before them too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from continuum_lmcache.bounded_dict import BoundedDict
from continuum_lmcache.tools.call_parser import without_thinking
from continuum_lmcache.types import ProgramId

WINDOW = 64  # returns in an estimate: a new template is learned within as many
LEAST_RETURNS = 16  # with fewer, the whole turn is expected
RARE = 0.1  # of the returns may repeat more than expected
OUTPUT_PROBES = 32  # blocks of an output that are compared
PROMPT_PROBES = 8
MOST_KINDS = 1024  # of turns; the longest unseen are dropped
MOST_AWAY = 4096  # programs whose last turn is kept; for those away longest nothing is learned

Kind = tuple[str, str]
"""Turns of one kind: their tenant, which can mislead only itself, and how they end."""


@dataclass(slots=True)
class ReuseShares:
    """What the latest returns of one kind repeated, as shares in [0, 1]."""

    prompt: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    output: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))  # 0 if not all of the prompt


@dataclass(frozen=True, slots=True)
class PausedTurn:
    """A finished turn whose program is away. A probe: a number of blocks, and the hash of the last one."""

    kind: Kind
    prompt_tokens: int
    context_tokens: int
    probes: tuple[tuple[int, Hashable], ...]


@dataclass(slots=True)
class PrefixReusePredictor:
    """One model's returns, by the kind of the turn before."""

    block_tokens: int  # covered by one hash
    learns: bool = True
    _away: BoundedDict[ProgramId, PausedTurn] = field(default_factory=lambda: BoundedDict(MOST_AWAY))
    _shares: BoundedDict[Kind, ReuseShares] = field(default_factory=lambda: BoundedDict(MOST_KINDS))

    def expected_tokens(self, kind: Kind, prompt_tokens: int, context_tokens: int) -> int:
        """How many of the first tokens of a turn that ended with this context may be used again."""
        seen = self._shares.get(kind)
        if seen is None or len(seen.prompt) < LEAST_RETURNS:
            return context_tokens
        if (share := expected_share(seen.prompt)) < 1.0:
            return round(share * prompt_tokens)
        return prompt_tokens + round(expected_share(seen.output) * (context_tokens - prompt_tokens))

    def on_pause(
        self,
        program: ProgramId,
        kind: Kind,
        prompt_tokens: int,
        context_tokens: int,
        hashes: Sequence[Hashable],
    ) -> int:
        """A turn has ended in a tool call; `hashes` are those of its context's whole blocks.

        Returns how many of its first tokens may be used again.
        """
        probes = self._probes(prompt_tokens, context_tokens, hashes) if self.learns else ()
        if probes:  # else it is shorter than a block
            self._away[program] = PausedTurn(kind, prompt_tokens, context_tokens, probes)
        return self.expected_tokens(kind, prompt_tokens, context_tokens)

    def _probes(
        self, prompt_tokens: int, context_tokens: int, hashes: Sequence[Hashable]
    ) -> tuple[tuple[int, Hashable], ...]:
        """The blocks with which the next prompt is compared (PausedTurn.probes)."""
        whole = min(context_tokens // self.block_tokens, len(hashes))
        places = probe_positions(min(prompt_tokens // self.block_tokens, whole), whole)
        return tuple([(blocks, hashes[blocks - 1]) for blocks in places])

    def on_return(self, program: ProgramId, hashes: Sequence[Hashable]) -> int | None:
        """The program's next prompt is here: how many of its tokens repeat the turn before, at most.

        None if that turn is not known.
        """
        left = self._away.pop(program, None)
        if left is None:
            return None
        tokens = self._repeated_tokens(left, hashes)
        seen = self._shares[left.kind] = self._shares.get(left.kind, ReuseShares())
        prompt_blocks = left.prompt_tokens // self.block_tokens
        whole_prompt = tokens >= prompt_blocks * self.block_tokens
        seen.prompt.append(1.0 if whole_prompt else tokens / left.prompt_tokens)
        output_tokens = left.context_tokens - left.prompt_tokens
        more_tokens = max(0, tokens - left.prompt_tokens)
        seen.output.append(more_tokens / output_tokens if output_tokens else 1.0)
        return tokens

    def on_program_end(self, program: ProgramId) -> None:
        """The program ended: drop its turn."""
        self._away.pop(program, None)

    def _repeated_tokens(self, left: PausedTurn, hashes: Sequence[Hashable]) -> int:
        """The whole turn, or the whole blocks before the first known difference."""
        reached = 0
        for blocks, known in reversed(left.probes):
            if blocks <= len(hashes) and hashes[blocks - 1] == known:
                reached = blocks
                break
        differs = next((blocks for blocks, _ in left.probes if blocks > reached), None)
        return left.context_tokens if differs is None else (differs - 1) * self.block_tokens


def probe_positions(prompt_blocks: int, whole_blocks: int) -> list[int]:
    """The blocks to compare: a few in the prompt, its end, the block after it, and the output."""
    output_blocks = whole_blocks - prompt_blocks
    places = {prompt_blocks * part // PROMPT_PROBES for part in range(1, PROMPT_PROBES + 1)}
    places |= {prompt_blocks + output_blocks * part // OUTPUT_PROBES for part in range(1, OUTPUT_PROBES + 1)}
    return sorted([place for place in places | {prompt_blocks + 1} if 0 < place <= whole_blocks])


def expected_share(shares: deque[float]) -> float:
    """The value that all but RARE of the returns do not exceed."""
    return sorted(shares)[-1 - int(RARE * len(shares))]


def ending_of(text: str) -> str:
    """How a turn with this text ended: templates drop thoughts, and keep plain answers."""
    if not text:
        return "unread"
    return "plain" if without_thinking(text) == text else "thought"
