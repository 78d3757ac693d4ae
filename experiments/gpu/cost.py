"""Measures our scheduler's CPU time, for comparison with the device's time of a step."""

from __future__ import annotations

from statistics import median
from typing import Any

from experiments.overhead import contenders, measured, middle_us, turn_costs_ms
from experiments.sweep.timed import WARM_UP_ROUNDS

SIZES = (1, 16, 256)  # turns that decode
ROUNDS, REPEATS = 30, 3


def costs() -> dict[str, Any]:
    """Milliseconds of CPU time by running turns and contender: schedule(), the whole step; and of a turn."""
    steps = {}
    for running in SIZES:
        benches = contenders(running, 0, 0, (ROUNDS + WARM_UP_ROUNDS) * REPEATS)
        found = list(measured(benches, ROUNDS, REPEATS))
        steps[running] = {
            name: {
                part: median(middle_us(repeat[name], f"{part}_us") for repeat in found) / 1e3
                for part in ("schedule", "whole")
            }
            for name in benches
        }
    turns = list(turn_costs_ms(ROUNDS, REPEATS))
    turn = {name: median(repeat[name] for repeat in turns) for name in turns[0]}
    return {"steps_ms": steps, "turn_ms": turn, "failed": ""}
