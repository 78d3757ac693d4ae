"""Chooses a step's token budget: vLLM's own, or a smaller chunk of the prompts beside the decodes.

Every decode in a step waits for the prompts in it. A prompt that is cut into n steps more ends n * F later,
and so does each turn that waits behind it. F is the time of a step with a prompt, without the prompt's
tokens. In these steps each of the R decoding turns gets n tokens: it ends n inter-token times earlier, and
n * F later. A turn that ends meanwhile does not wait for the rest of the prompt: per step that is half the
time of the prompt tokens that come per decoded token. So a smaller chunk pays if

    R * (inter-token time + prompt time per decoded token / 2 - F) > (1 + waiting turns) * F

Where it does not, all prompts that share a step still end with it. In two halves of a step of B tokens,
B / 2P prompts of P tokens end B / 2 tokens earlier, and all turns that wait end F later. So halves pay beyond
B = 2 * sqrt(P * (1 + waiting turns) * F / time of a prompt's token).

All times are measured in the running server, since they depend on the card, the model, the connector and the
server's own work. Until enough steps with prompts were seen a step has P prompt tokens.
Figures: experiments/records/LOG.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

SMALLEST_TOKENS = 128  # of a chosen chunk: below it a card's step takes the time of reading the weights
PROMPT_TOKENS = 2048  # P above, assumed; so many at least in a step whose prompts are not cut
LEAST_STEPS = 20  # with prompts, and with decodes, before a chunk is chosen
STEP_DECAY = 0.998  # each step: half of the weight is younger than 350 steps
PROMPT_DECAY = 0.99995  # each step: minutes. With a faster one, too small a chunk would confirm itself
PRIOR_VARIANCE = 0.05  # of the mean weight squared: how much the curve counts where sizes hardly differ


@dataclass(slots=True)
class StepTimes:
    """How long steps take, measured; older ones fade.

    A step's weight is its tokens' seconds by the prefill curve. The seconds of steps with prompts are a line
    over their weights, by least squares: a fixed part, and what a second of weight takes, 1 at first.
    """

    _n: float = 0.0  # steps with prompts; the next five are sums over them
    _weight_s: float = 0.0
    _took_s: float = 0.0
    _squares: float = 0.0
    _products: float = 0.0
    _tokens: float = 0.0
    _decodes: float = 0.0  # steps with decodes; the next two are sums over them
    _decodes_s: float = 0.0
    _decoded_tokens: float = 0.0  # of each decoding turn

    def on_prompts(self, took_s: float, tokens: int, weight_s: float) -> None:
        """A step computed so many tokens of prompts, beside any number of decodes."""
        self._n = self._n * STEP_DECAY + 1
        self._weight_s = self._weight_s * STEP_DECAY + weight_s
        self._took_s = self._took_s * STEP_DECAY + took_s
        self._squares = self._squares * STEP_DECAY + weight_s * weight_s
        self._products = self._products * STEP_DECAY + weight_s * took_s
        self._tokens = self._tokens * STEP_DECAY + tokens

    def on_decodes(self, took_s: float, tokens: float) -> None:
        """A step has ended in which each decoding turn computed so many tokens: one, and its drafts."""
        self._decodes = self._decodes * STEP_DECAY + 1
        self._decodes_s = self._decodes_s * STEP_DECAY + took_s
        self._decoded_tokens = self._decoded_tokens * STEP_DECAY + tokens

    @property
    def prompts_are_known(self) -> bool:
        return self._n >= LEAST_STEPS

    @property
    def decodes_are_known(self) -> bool:
        return self._decodes >= LEAST_STEPS

    @property
    def inter_token_s(self) -> float:
        """Seconds between two tokens of a turn, prompts and transfers in between included."""
        return self._decodes_s / self._decoded_tokens

    def prompt_s(self) -> tuple[float, float]:
        """Seconds of a step with prompts without their tokens (F above), and of each of these tokens."""
        weight_s, took_s = self._weight_s / self._n, self._took_s / self._n
        if weight_s <= 0:  # by the profile tokens cost nothing
            return took_s, 0.0
        prior = PRIOR_VARIANCE * weight_s * weight_s
        variance = self._squares / self._n - weight_s * weight_s
        together = self._products / self._n - weight_s * took_s
        slope = max(0.0, min((together + prior) / (variance + prior), took_s / weight_s))
        return took_s - slope * weight_s, slope * self._weight_s / self._tokens


@dataclass(slots=True)
class PrefillChunkTuner:
    """The budget of a step, from the times of earlier ones and the tokens of earlier prompts and decodes."""

    most_tokens: int  # vLLM's own budget: never more
    times: StepTimes = field(default_factory=StepTimes)
    _prompt_tokens: float = 0.0
    _decode_tokens: float = 0.0

    def record(self, prompt_tokens: int, decode_tokens: int) -> None:
        """A step computed this many tokens of each kind."""
        self._prompt_tokens = self._prompt_tokens * PROMPT_DECAY + prompt_tokens
        self._decode_tokens = self._decode_tokens * PROMPT_DECAY + decode_tokens

    def budget_tokens(self, decoding: int, running: int, waiting: int, each: int = 1) -> int:
        """For a step with so many decodes of `each` tokens: room for these, and for prompts as they come.
        `waiting`: turns in the queue, and in admission's line.

        With a share below their arrival rate, prompts would wait instead of decodes. So the share is computed
        for all `running` turns: prompts that pile up leave few decodes, and would get less and less. And a
        chunk takes no less time than its step's fixed part, so a prompt takes at most twice its time.
        """
        if not self.times.prompts_are_known:
            return min(self.most_tokens, decoding * each + PROMPT_TOKENS)
        fixed_s, token_s = self.times.prompt_s()
        fixed_tokens = math.ceil(fixed_s / max(token_s, 1e-9))
        shared = round(2 * math.sqrt(PROMPT_TOKENS * (1 + waiting) * fixed_tokens))
        uncut = min(self.most_tokens, decoding * each + max(PROMPT_TOKENS, shared))
        if not (decoding and self._decode_tokens and self.times.decodes_are_known):
            return uncut
        pace = self._prompt_tokens / self._decode_tokens  # prompt tokens per decoded one
        turns = max(decoding, running)
        gain_s = turns * (each * (self.times.inter_token_s + token_s * pace / 2) - fixed_s)
        if gain_s <= (1 + waiting) * fixed_s:
            return uncut
        chunk = max(SMALLEST_TOKENS, round(pace * turns * each), fixed_tokens)
        return min(self.most_tokens, decoding * each + chunk)  # where prompts pile up, above `uncut`
