"""Forecasts a program's context, from every finished turn and every ended program."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from continuum_lmcache.types import MAX_TURNS

TURN_WINDOW = 512  # number of growths in the mean: some dozens of programs
PROGRAM_WINDOW = 256
PRIOR_GROWTH_SHARE = 0.25  # of the usual first prompt, per turn: a tool's answer and the model's output
PRIOR_GROWTHS = 4
PRIOR_TURNS = 9
PRIOR_PROGRAMS = 4
LEAST_FILL = 0.5  # of the cache, however much programs differ
MARGIN_DEVIATIONS = 3  # standard deviations of the sum of contexts that must fit too
EXPONENT_PROGRAMS = 8  # number of known programs at which half of the fitted exponent is used


@dataclass(slots=True)
class ContextGrowth:
    """Contexts by age. A prior replaces missing observations, and fades with their number."""

    _growths: deque[int] = field(default_factory=lambda: deque(maxlen=TURN_WINDOW))
    _grown_tokens: int = 0
    _lengths: deque[int] = field(default_factory=lambda: deque(maxlen=PROGRAM_WINDOW))
    _firsts: deque[int] = field(default_factory=lambda: deque(maxlen=PROGRAM_WINDOW))
    first_tokens: float = 0.0  # the usual first prompt; 0 before the first
    _sizes: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=PROGRAM_WINDOW))
    _spread_tokens: float = 0.0  # standard deviation of a program's growth, first prompt to last context
    _left: dict[int, float] = field(default_factory=dict)  # by turns done, until a program ends

    def add_first_prompt(self, tokens: int) -> None:
        """A program arrived with a first prompt of this many tokens."""
        self._firsts.append(tokens)
        self.first_tokens = sum(self._firsts) / len(self._firsts)

    def add_turn(self, tokens: int) -> None:
        """A turn ended with `tokens` more than the program's last one. A context that shrank counts as 0."""
        if len(self._growths) == TURN_WINDOW:
            self._grown_tokens -= self._growths[0]
        self._growths.append(max(0, tokens))
        self._grown_tokens += max(0, tokens)

    def add_program(self, turns: int, first_tokens: int = 0, final_tokens: int = 0) -> None:
        """A program ended after this many turns; with its first prompt and last context, if known."""
        if 1 <= turns <= MAX_TURNS:
            self._lengths.append(turns)
            self._left.clear()
        if 0 < first_tokens <= final_tokens:
            self._sizes.append((first_tokens, final_tokens))
            # statistics.pstdev is exact and takes 0.16 ms of the engine's loop at 256 programs; this 0.02
            grown = [final - first for first, final in self._sizes]
            mean = sum(grown) / len(grown)
            self._spread_tokens = math.sqrt(sum((tokens - mean) ** 2 for tokens in grown) / len(grown))

    @property
    def first_prompt_exponent(self) -> float:
        """How well a first prompt predicts the whole program: final ~ first ** exponent, in [0, 1].

        Least squares of the logarithms, shrunk to 0 while few programs are known. In agents' traces it
        is between 0 and 0.6 (experiments/LOG.md), so it cannot be assumed.
        """
        n = len(self._sizes)
        if n < 2:
            return 0.0
        logs = [(math.log(first), math.log(final)) for first, final in self._sizes]
        mean_x, mean_y = (sum(column) / n for column in zip(*logs, strict=True))
        spread = sum((x - mean_x) ** 2 for x, _ in logs)
        together = sum((x - mean_x) * (y - mean_y) for x, y in logs)
        slope = together / spread if spread > 0 else 0.0
        return max(0.0, min(1.0, slope)) * n / (n + EXPONENT_PROGRAMS)

    @property
    def turn_tokens(self) -> float:
        """How much a context grows from one turn's end to the next one's, in tokens."""
        prior = PRIOR_GROWTHS * PRIOR_GROWTH_SHARE * self.first_tokens
        return (self._grown_tokens + prior) / (len(self._growths) + PRIOR_GROWTHS)

    def turns_left(self, done: int) -> float:
        """E[N - done | N > done], at least 1, since the program has a turn here."""
        if done not in self._left:
            longer = [n - done for n in self._lengths if n > done]
            longer += [PRIOR_TURNS - done] * PRIOR_PROGRAMS if done < PRIOR_TURNS else []
            self._left[done] = sum(longer) / len(longer) if longer else 1.0
        return self._left[done]

    @property
    def final_tokens(self) -> float:
        """The usual context at a program's end."""
        return self.first_tokens + self.turn_tokens * self.turns_left(0)

    def forecast_tokens(self, own_tokens: int, turns: int) -> float:
        """The context half-way from now to the program's end, without its head: what it holds on average."""
        return own_tokens + self.turn_tokens * max(1.0, self.turns_left(turns) / 2)

    def forecasts_that_fit(self, gpu_tokens: int) -> float:
        """The largest sum of forecasts, in tokens, with which the contexts still fit `gpu_tokens`.

        Programs of all ages hold (first + final) / 2 at the mean and are forecast (first + 3 final) / 4.
        The sum of m contexts varies around m times the mean, and MARGIN_DEVIATIONS of its deviations must fit
        too: much in a cache that holds ten programs, little where it holds a hundred. One program's deviation
        is that of a uniform age over a growth that varies. First prompts add no deviation, however much
        they differ, since they are known when programs start.
        """
        first, final = self.first_tokens, self.final_tokens
        if not first:
            return float(gpu_tokens)
        mean_tokens = (first + final) / 2
        deviation = math.sqrt(((final - first) ** 2 / 4 + self._spread_tokens**2) / 3) / mean_tokens
        programs = max(1.0, gpu_tokens / mean_tokens)
        filled = max(LEAST_FILL, 1.0 - MARGIN_DEVIATIONS * deviation / math.sqrt(programs))
        return gpu_tokens * filled * (first + 3 * final) / 4 / mean_tokens
