"""The share of the engine's time that prompts take."""

from __future__ import annotations

import math
from dataclasses import dataclass

AVERAGING_S = 30.0  # how much of the past counts: prompts begin and end within seconds


@dataclass(slots=True)
class PrefillShare:
    """Which share of the latest half minute went into steps that compute prompts."""

    share: float = 0.0  # at at_s
    at_s: float = 0.0

    def on_prefill(self, now_s: float, took_s: float) -> None:
        """A step that computed prompts has ended, after `took_s`."""
        self.share = min(1.0, self.now(now_s) - math.expm1(-took_s / AVERAGING_S))
        self.at_s = now_s

    def now(self, now_s: float) -> float:
        """The share, with no such step since the last one."""
        return self.share * math.exp(-max(0.0, now_s - self.at_s) / AVERAGING_S)
