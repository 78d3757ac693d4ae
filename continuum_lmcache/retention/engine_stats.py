"""Estimates T and eta of Continuum, arXiv 2511.02230 §4, from an engine's past.

The paper does not define how both are sampled, and its public code computes neither. Each choice made
here is explained where it is made.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from continuum_lmcache.types import MAX_TURNS

QUEUE_WINDOW = 100  # number of delays in T: the paper's K, minutes under load, so that T follows it
PROGRAM_WINDOW = 256  # number of finished programs in eta: enough for a stable sign


@dataclass(slots=True)
class TurnMoments:
    """Sums over the pairs (x, y) = (k, N - k), k = 1..N, of some programs of N turns. Exact integers."""

    n: int = 0
    x: int = 0
    y: int = 0
    xx: int = 0
    yy: int = 0
    xy: int = 0

    def add(self, turns: int, sign: int) -> None:
        """Count a program of `turns` turns in (+1) or out (-1), by the closed forms of the sums."""
        squares = turns * (turns + 1) * (2 * turns + 1) // 6
        self.n += sign * turns
        self.x += sign * turns * (turns + 1) // 2
        self.y += sign * turns * (turns - 1) // 2
        self.xx += sign * squares
        self.yy += sign * (squares - turns * turns)
        self.xy += sign * (turns - 1) * turns * (turns + 1) // 6

    @property
    def correlation(self) -> float:
        """Pearson's, in [-1, 1]. Only for pairs that vary in both x and y."""
        spread_x = self.n * self.xx - self.x * self.x
        spread_y = self.n * self.yy - self.y * self.y
        together = self.n * self.xy - self.x * self.y
        return max(-1.0, min(1.0, together / math.sqrt(spread_x) / math.sqrt(spread_y)))


@dataclass(slots=True)
class EvictionStats:
    """Queueing delays of evicted turns, and how long programs are. O(1) an event."""

    _delays_s: deque[float] = field(default_factory=lambda: deque(maxlen=QUEUE_WINDOW))
    _programs: deque[int] = field(default_factory=deque)
    _moments: TurnMoments = field(default_factory=TurnMoments)
    _lengths: dict[int, int] = field(default_factory=dict)  # how many programs of each length

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
        if not 1 <= total_turns <= MAX_TURNS:
            return
        if len(self._programs) == PROGRAM_WINDOW:
            self._count(self._programs.popleft(), -1)
        self._programs.append(total_turns)
        self._count(total_turns, +1)

    @property
    def queue_delay_s(self) -> float:
        """T: mean delay of the last evicted turns, seconds; 0 before the first (the paper's start)."""
        return sum(self._delays_s) / len(self._delays_s) if self._delays_s else 0.0

    @property
    def queue_delay_samples(self) -> int:
        """Number of delays in T, at most QUEUE_WINDOW."""
        return len(self._delays_s)

    @property
    def eta(self) -> float:
        """-Corr(turns done, turns left), in [-1, 1]: near 1 if a program that went on long is nearly done.

        1 until programs of two different lengths were seen: with one length the correlation is -1
        by construction, and with none there is no data (the cold start's eta).
        """
        return -self._moments.correlation if len(self._lengths) > 1 else 1.0

    @property
    def eta_samples(self) -> int:
        """Number of finished programs in eta, at most PROGRAM_WINDOW."""
        return len(self._programs)

    def _count(self, turns: int, sign: int) -> None:
        self._moments.add(turns, sign)
        self._lengths[turns] = self._lengths.get(turns, 0) + sign
        if not self._lengths[turns]:
            del self._lengths[turns]
