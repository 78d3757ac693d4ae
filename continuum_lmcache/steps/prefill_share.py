"""The share of the engine's time that prompts take."""

from __future__ import annotations

import math
from dataclasses import dataclass

AVERAGING_S = 30.0  # how much of the past counts: prompts begin and end within seconds


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
