"""Estimates T and eta of Continuum, arXiv 2511.02230 §4, from an engine's past.

The paper does not define how both are sampled, and its public code computes neither.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from continuum_lmcache.types import MAX_TURNS

QUEUE_WINDOW = 100  # number of delays in T: the paper's K, minutes under load, so that T follows it
PROGRAM_WINDOW = 256  # number of finished programs in eta: enough for a stable sign


@dataclass(slots=True)
class EvictionStats:
    """Queueing delays of evicted turns, and how long programs are."""

    _delays_s: deque[float] = field(default_factory=lambda: deque(maxlen=QUEUE_WINDOW))
    _programs: deque[int] = field(default_factory=lambda: deque(maxlen=PROGRAM_WINDOW))
    eta: float = 1.0
    """-Corr(turns done, turns left), in [-1, 1]: near 1 if a program that went on long is nearly done.

    1 until programs of two different lengths were seen: with one length the correlation is -1
    by construction, and with none there is no data (the cold start's eta).
    """

    def observe_queue_delay(self, delay_s: float, evicted: bool) -> None:
        """A turn left the waiting queue after `delay_s`, in seconds.

        It counts in T if its program's KV had been `evicted`: it came back without a pin and had to
        reload or recompute something. A program's first turn lost nothing and does not count; nor
        does a turn that found its pin. Delays that are negative or not finite are ignored.
        """
        if evicted and 0.0 <= delay_s < math.inf:
            self._delays_s.append(delay_s)

    def observe_program(self, total_turns: int) -> None:
        """A program ended after `total_turns` turns. Impossible numbers are ignored.

        All of k = 1..N are samples, the last turn too: the scheduler also decides at its end,
        mostly without knowing that it is the last.
        """
        if 1 <= total_turns <= MAX_TURNS:
            self._programs.append(total_turns)
            self._correlate()

    def withdraw_program(self, total_turns: int) -> None:
        """A program of `observe_program` goes on after all; nothing if the window has moved past it."""
        if total_turns in self._programs:
            self._programs.remove(total_turns)
            self._correlate()

    def _correlate(self) -> None:
        programs = Counter(self._programs)
        self.eta = -correlation(programs) if len(programs) > 1 else 1.0

    @property
    def queue_delay_s(self) -> float:
        """T: mean delay of the last evicted turns, seconds; 0 before the first (the paper's start)."""
        return sum(self._delays_s) / len(self._delays_s) if self._delays_s else 0.0


def correlation(programs: Mapping[int, int]) -> float:
    """Pearson's over the pairs (k, N - k), k = 1..N, of programs of N turns, in [-1, 1].

    `programs`: how many there are of each N, of two N at least. The sums' closed forms, exact integers.
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
