"""Forecasts a program's context, from every finished turn and every ended program; and eta of eq. 2."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from continuum_lmcache.types import MAX_TURNS

WINDOW = 512  # the latest turns, and the latest programs, that count
PRIOR_GROWTH_SHARE = 0.25  # of the usual first prompt, a turn, until one has ended
PRIOR_TURNS = 9
PRIOR_PROGRAMS = 4
LEAST_FILL = 0.5  # of the cache, however much programs differ
MARGIN_DEVIATIONS = 3  # standard deviations of the sum of contexts that must fit too


@dataclass(slots=True)
class ContextGrowth:
    """Contexts by age. Priors replace missing observations."""

    _growths: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _lengths: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _firsts: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW))
    first_tokens: float = 0.0  # the usual first prompt; 0 before the first
    _left: dict[int, float] = field(default_factory=dict)  # by turns done, until a program ends
    _eta: float | None = None  # likewise

    def add_first_prompt(self, tokens: int) -> None:
        """A program arrived with a first prompt of this many tokens."""
        self._firsts.append(tokens)
        self.first_tokens = sum(self._firsts) / len(self._firsts)

    def add_turn(self, tokens: int) -> None:
        """A turn ended with `tokens` more than the program's last one. A context that shrank counts as 0."""
        self._growths.append(max(0, tokens))

    def program_ended(self, turns: int) -> None:
        if 1 <= turns <= MAX_TURNS:
            self._lengths.append(turns)
            self._lengths_changed()

    def program_goes_on(self, turns: int) -> None:
        """A program of `program_ended` goes on after all; nothing if the window has moved past it."""
        if turns in self._lengths:
            self._lengths.remove(turns)
            self._lengths_changed()

    def _lengths_changed(self) -> None:
        self._left.clear()
        self._eta = None

    @property
    def eta(self) -> float:
        """-Corr(turns done, turns left) of Continuum, arXiv 2511.02230 §4, in [-1, 1]: near 1 if a program
        that went on long is nearly done. The paper does not define how it is sampled, and its public code
        does not compute it.

        1 until programs of two different lengths were seen: with one length the correlation is -1
        by construction, and with none there is no data (the cold start's eta).
        """
        if self._eta is None:
            programs = Counter(self._lengths)
            self._eta = -correlation(programs) if len(programs) > 1 else 1.0
        return self._eta

    @property
    def turn_tokens(self) -> float:
        """How much a context grows from one turn's end to the next one's, in tokens."""
        seen = self._growths
        return sum(seen) / len(seen) if seen else PRIOR_GROWTH_SHARE * self.first_tokens

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
        is that of a uniform age. First prompts add none, however much they differ, since they are known when
        programs start.
        """
        first, final = self.first_tokens, self.final_tokens
        if not first:
            return float(gpu_tokens)
        mean_tokens = (first + final) / 2
        deviation = (final - first) / math.sqrt(12) / mean_tokens
        programs = max(1.0, gpu_tokens / mean_tokens)
        filled = max(LEAST_FILL, 1.0 - MARGIN_DEVIATIONS * deviation / math.sqrt(programs))
        return gpu_tokens * filled * (first + 3 * final) / 4 / mean_tokens


def correlation(programs: Mapping[int, int]) -> float:
    """Pearson's over the pairs (k, N - k), k = 1..N, of programs of N turns, in [-1, 1].

    `programs`: how many there are of each N, of two N at least. The last turn counts too: the scheduler also
    decides at its end, mostly without knowing that it is the last. The sums' closed forms, exact integers.
    """
    n = x = y = xx = yy = xy = 0
    for turns, many in programs.items():
        squares = turns * (turns + 1) * (2 * turns + 1) // 6
        n += many * turns
        x += many * turns * (turns + 1) // 2
        y += many * turns * (turns - 1) // 2
        xx += many * squares
        yy += many * (squares - turns * turns)
        xy += many * (turns - 1) * turns * (turns + 1) // 6
    together = (n * xy - x * y) / math.sqrt(n * xx - x * x) / math.sqrt(n * yy - y * y)
    return max(-1.0, min(1.0, together))
