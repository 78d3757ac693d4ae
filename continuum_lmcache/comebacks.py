"""Do programs come back after their first turn? Who opens many that do not, shall not speak for much.

A new program that pauses is expected to return and to grow. As long as at least half of the latest ones
did return, each is believed. Where fewer do, what those in their first pause speak for shrinks with them.
"""

from __future__ import annotations

from dataclasses import dataclass

STEP = 1 / 32  # weight of the newest pause
LATE_GAPS = 4.0  # times the mean pause: who is away for longer counts as one who does not return
LEAST_LATE_S = 1.0
BELIEVED = 0.5  # the share of returns from which on everybody is believed


@dataclass(slots=True)
class Comebacks:
    """Learns from first pauses; their lengths in seconds."""

    share: float = 1.0  # of the latest first pauses, those that ended in time
    gap_s: float = LEAST_LATE_S

    @property
    def belief(self) -> float:
        """Which part of what a program in its first pause would speak for is to be counted, 0 to 1."""
        return 1.0 if self.share >= BELIEVED else self.share

    @property
    def late_s(self) -> float:
        """After how long a pause is one that nobody returns from."""
        return max(LEAST_LATE_S, LATE_GAPS * self.gap_s)

    def back(self, gap_s: float, was_late: bool) -> None:
        """A program returned from its first pause. `was_late`: it had been counted as one that does not."""
        self.gap_s += STEP * (gap_s - self.gap_s)
        for _ in range(1 + was_late):
            self.share += STEP * (1.0 - self.share)

    def late(self) -> None:
        """A first pause has lasted for `late_s`."""
        self.share -= STEP * self.share
