"""The share of the engine's time that prompts take."""

from __future__ import annotations

import math
from dataclasses import dataclass

SETTLING_S = 30.0  # prompts begin and end within seconds: the length of the past that counts


@dataclass(slots=True)
class PrefillShare:
    """Which share of the latest half minute went into steps that compute prompts."""

    share: float = 0.0  # at at_s
    at_s: float = 0.0

    def on_step(self, now_s: float, prompts_s: float) -> None:
        """A step has ended. `prompts_s`: its seconds, 0 for one of decodes alone."""
        passed_s = max(now_s - self.at_s, prompts_s)
        share = prompts_s / passed_s if passed_s > 0 else 0.0
        self.share = self.now(self.at_s + passed_s) + share * -math.expm1(-passed_s / SETTLING_S)
        self.at_s = now_s

    def now(self, now_s: float) -> float:
        """The share, with no step since the last one."""
        return self.share * math.exp(-max(0.0, now_s - self.at_s) / SETTLING_S)
