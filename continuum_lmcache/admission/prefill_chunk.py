"""Chooses a step's token budget. Every decode in a step waits for the prompts' chunk in it.

Agents' turns have short outputs and long prompts, so decodes mostly wait for other turns' prefill. A small
chunk makes a step short, but the fixed part of a step's time is paid more often: weights, launches, and the
linear layers' loss on few tokens. The smallest chunk that pays depends on the machine, so this
uses measured step times, and without them keeps vLLM's own setting.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LARGEST_TOKENS = 2048  # of a chosen chunk: beyond it the fixed part is negligible
SMALLEST = ((128, 0.40), (256, 0.55), (LARGEST_TOKENS, 0.85))
"""A chunk of this many tokens pays if its fixed time is below this share of a decode-only step's:
then the prompt's tokens are added to steps that decodes need anyway. Shares from the simulator."""
DECAY = 0.99995  # each step: minutes. With a faster decay, a chunk that is too small would confirm itself


def smallest_chunk(step_s: Mapping[int, float]) -> int | None:
    """The smallest chunk, in tokens, that pays by these times of a step, by tokens of chunk (0: decodes
    alone). None if none pays, or if too little was measured: 0 and two sizes at least.

    A token's cost is taken from the two largest sizes up to LARGEST_TOKENS. Beyond that, a chunk's attention
    to itself would raise a token's cost and lower the fixed part.
    """
    sizes = sorted(n for n in step_s if 0 < n <= LARGEST_TOKENS)
    if 0 not in step_s or len(sizes) < 2:
        return None
    slope_s = (step_s[sizes[-1]] - step_s[sizes[-2]]) / (sizes[-1] - sizes[-2])
    for tokens, share in SMALLEST:
        if tokens in step_s and step_s[tokens] - tokens * slope_s < share * step_s[0]:
            return tokens
    return None


@dataclass(slots=True)
class PrefillChunkTuner:
    """The budget of a step, from measured times and the tokens of earlier prompts and decodes."""

    step_s: Mapping[int, float]
    most_tokens: int  # vLLM's own budget: never more
    smallest: int | None = field(init=False)
    _prompt_tokens: float = 0.0
    _decode_tokens: float = 0.0

    def __post_init__(self) -> None:
        self.smallest = smallest_chunk(self.step_s)

    def record(self, prompt_tokens: int, decode_tokens: int) -> None:
        """A step computed this many tokens of each kind."""
        self._prompt_tokens = self._prompt_tokens * DECAY + prompt_tokens
        self._decode_tokens = self._decode_tokens * DECAY + decode_tokens

    def budget_tokens(self, decoding: int, running: int = 0) -> int:
        """For a step with this many decodes: room for these, and for prompts at their arrival rate.

        With a share below their arrival rate, prompts would wait instead of decodes. So the share is computed
        for all `running`: prompts that pile up leave few decodes, and would get less and less.
        """
        if self.smallest is None or not decoding:
            return self.most_tokens
        pace = self._prompt_tokens / self._decode_tokens if self._decode_tokens else LARGEST_TOKENS
        chunk = max(self.smallest, min(LARGEST_TOKENS, round(pace * max(decoding, running))))
        return min(self.most_tokens, decoding + chunk)
