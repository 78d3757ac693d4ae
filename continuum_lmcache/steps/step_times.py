"""How long steps take, by what they compute, and the share of the time that prompts take. Measured in the
running server, since it depends on the card, the model, the connector and the server's own work."""

from __future__ import annotations

import math
from dataclasses import dataclass

LEAST_STEPS = 20  # with prompts, and with decodes, before a chunk is chosen
STEP_DECAY = 0.998  # each step: half of the weight is younger than 350 steps
PROMPT_DECAY = 0.99995  # each step: minutes. With a faster one, too small a chunk would confirm itself
PRIOR_VARIANCE = 0.05  # of the mean weight squared: how much the curve counts where sizes hardly differ
AVERAGING_S = 30.0  # how much of the past counts in the share: prompts begin and end within seconds


@dataclass(slots=True)
class PrefillShare:
    """Which share of the latest half minute of steps went into those that compute prompts.

    Idle time does not count, nor does the time before the first step: an engine that starts or wakes up
    would seem to have time, and would admit more programs than it can serve (LOG.md, 2026-11-26).
    """

    _prompts: float = 0.0  # as if the steps before the first one had computed none
    _steps: float = 0.0  # how much of the half minute is known, 0 to 1

    def on_step(self, took_s: float, prefills: bool) -> None:
        """A step has ended, after `took_s`. `prefills`: it computed prompts."""
        weight = -math.expm1(-took_s / AVERAGING_S)
        self._prompts += weight * (prefills - self._prompts)
        self._steps += weight * (1.0 - self._steps)

    @property
    def share(self) -> float:
        """0 to 1; 0 before the first step."""
        return self._prompts / self._steps if self._steps else 0.0


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
    _all_prompt_tokens: float = 0.0  # of scheduled steps, for longer
    _all_decode_tokens: float = 0.0

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

    def on_schedule(self, prompt_tokens: int, decode_tokens: int) -> None:
        """A step is computed with so many tokens of each kind."""
        self._all_prompt_tokens = self._all_prompt_tokens * PROMPT_DECAY + prompt_tokens
        self._all_decode_tokens = self._all_decode_tokens * PROMPT_DECAY + decode_tokens

    @property
    def prompt_tokens_each(self) -> float | None:
        """Prompt tokens that come for each decoded one; None before the first."""
        return self._all_prompt_tokens / self._all_decode_tokens if self._all_decode_tokens else None

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
        """Seconds of a step with prompts without their tokens, and of each of these tokens."""
        weight_s, took_s = self._weight_s / self._n, self._took_s / self._n
        if weight_s <= 0:  # by the profile tokens cost nothing
            return took_s, 0.0
        prior = PRIOR_VARIANCE * weight_s * weight_s
        variance = self._squares / self._n - weight_s * weight_s
        together = self._products / self._n - weight_s * took_s
        slope = max(0.0, min((together + prior) / (variance + prior), took_s / weight_s))
        return took_s - slope * weight_s, slope * self._weight_s / self._tokens
