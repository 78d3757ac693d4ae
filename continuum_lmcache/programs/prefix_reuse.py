"""How much of a finished turn the program's next prompt repeats, learned from every return.

    the turn          |-- prompt --------------|-- output ------|
    the next prompt   |-- the same ---------------|  something else

A chat template may drop the model's thoughts, and a client may encode an answer anew. KV after
the first difference is never used again. With few returns the whole turn is expected
to be repeated. divergence.py compares the two.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from continuum_lmcache.bounded_dict import BoundedDict
from continuum_lmcache.programs.divergence import PLAIN, THOUGHT, UNREAD, Divergence, TurnKind
from continuum_lmcache.tools.call_parser import without_thinking

WINDOW = 64  # returns in an estimate: a new template is learned within as many
LEAST_RETURNS = 16  # with fewer, the whole turn is expected
RARE = 0.1  # of the returns may repeat more than expected
MOST_KINDS = 1024  # of turns; the longest unseen are dropped


@dataclass(slots=True)
class ReuseShares:
    """What the latest returns of one kind repeated, as shares in [0, 1]."""

    prompt: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    output: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))  # 0 if not all of the prompt


@dataclass(slots=True)
class PrefixReusePredictor:
    """One model's returns, by the kind of the turn before."""

    block_tokens: int  # covered by one hash
    learns: bool = True
    _shares: BoundedDict[TurnKind, ReuseShares] = field(default_factory=lambda: BoundedDict(MOST_KINDS))

    def expected_tokens(self, kind: TurnKind, prompt_tokens: int, context_tokens: int) -> int:
        """How many of the first tokens of a turn that ended with this context may be used again."""
        seen = self._shares.get(kind)
        if seen is None or len(seen.prompt) < LEAST_RETURNS:
            return context_tokens
        if (share := expected_share(seen.prompt)) < 1.0:
            return round(share * prompt_tokens)
        return prompt_tokens + round(expected_share(seen.output) * (context_tokens - prompt_tokens))

    def on_return(self, found: Divergence) -> int | None:
        """The program's next prompt is here: how many tokens of its last turn can be used again.

        None if that is not learned, or the turn was shorter than a block.
        """
        if not self.learns or found.last_turn_tokens < self.block_tokens:
            return None
        prompt_tokens, tokens = found.last_prompt_tokens, found.last_turn_tokens
        if found.equal_tokens < tokens // self.block_tokens * self.block_tokens:
            tokens = found.equal_tokens  # the whole blocks before the first difference
        seen = self._shares[found.kind] = self._shares.get(found.kind, ReuseShares())
        whole_prompt = tokens >= prompt_tokens // self.block_tokens * self.block_tokens
        seen.prompt.append(1.0 if whole_prompt else tokens / prompt_tokens)
        output_tokens = found.last_turn_tokens - prompt_tokens
        more_tokens = max(0, tokens - prompt_tokens)
        seen.output.append(more_tokens / output_tokens if output_tokens else 1.0)
        return tokens


def expected_share(shares: deque[float]) -> float:
    """The value that all but RARE of the returns do not exceed."""
    return sorted(shares)[-1 - int(RARE * len(shares))]


def ending_of(text: str) -> str:
    """How a turn with this text ended: templates drop thoughts, and keep plain answers."""
    if not text:
        return UNREAD
    return PLAIN if without_thinking(text) == text else THOUGHT
