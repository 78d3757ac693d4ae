"""Measures our scheduler's CPU time, for comparison with the device's time of a step."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from experiments.overhead import Costs, step_costs, turn_costs

SIZES = (1, 16, 256)  # turns that decode
ROUNDS, REPEATS = 30, 3


def costs() -> dict[str, Any]:
    """Milliseconds of CPU time by contender: of a decode step by running turns, and of a turn."""
    steps = {running: middle_ms(step_costs(running, 0, ROUNDS, REPEATS)) for running in SIZES}
    return {"steps_ms": steps, "turn_ms": middle_ms(turn_costs(ROUNDS, REPEATS)), "failed": ""}


def middle_ms(repeats: Sequence[Costs]) -> dict[str, float]:
    return {name: median(median(costs[name]) for costs in repeats) for name in repeats[0]}
