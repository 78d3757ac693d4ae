"""Programs for the simulator: a published sweep, and changes that make the same programs harder to serve."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

from experiments.table1 import Lognormal, Shape
from experiments.workload import Program, TurnSpec, gaps_mapped

SMALL_SHAPES = {
    "tiny": Shape(Lognormal(8, 3), Lognormal(0.5, 1.0), Lognormal(2_000, 800), "bash"),
    "chat": Shape(Lognormal(1, 1e-3), Lognormal(0.5, 1.0), Lognormal(3_000, 3_000), "none"),  # one turn
}
"""Programs that have nothing to gain from a kept KV, in the terms of table1."""

SWEEP_PROMPTS = (92, 1840, 3449, 6025, 7454, 10_299, 12_333, 13_193)
"""Measured prompt tokens of the eight turns of one job (hungchun0201/agentic-ai-survey, H1 to H3)."""


def seeds_sweep(jps: float, seed: int = 42, arrive_s: float = 45.0) -> tuple[Program, ...]:
    """The sweep's jobs: eight turns of 20 output tokens, a tool of 0.5 s, Poisson arrivals, then a drain.

    Seed 42 gives its own arrivals: 54, 133, 255, 433 and 665 jobs at 1, 3, 6, 10 and 15 a second.
    Each growth of a prompt varies by +-3 %.
    """
    clock, arrivals_s = random.Random(seed), []
    at_s = clock.expovariate(jps)
    while at_s <= arrive_s:
        arrivals_s.append(at_s)
        at_s += clock.expovariate(jps)
    sizes = random.Random(f"sizes-{seed}")
    return tuple(_sweep_job(f"h{seed}-{i}", at_s, sizes) for i, at_s in enumerate(arrivals_s))


def _sweep_job(name: str, arrival_s: float, sizes: random.Random) -> Program:
    turns: list[TurnSpec] = []
    history = 0
    for before, size in zip((0, *SWEEP_PROMPTS), SWEEP_PROMPTS, strict=False):
        growth = round((size - before) * sizes.uniform(0.97, 1.03))
        prompt = max((turns[-1].input_tokens if turns else 0) + growth, history + 1)
        turns.append(TurnSpec(prompt, prompt - history, 20, "bash", "", 0.5))
        history = turns[-1].context_tokens
    return Program(name, arrival_s, (*turns[:-1], replace(turns[-1], gap_s=None)), "seeds-sweep")


def with_tool_time(programs: Iterable[Program], factor: float, from_s: float = 0.0) -> tuple[Program, ...]:
    """The programs with every tool `factor` times as long, for those that arrive from `from_s` on."""
    return tuple(
        gaps_mapped(p, lambda gap_s: gap_s * factor) if p.arrival_s >= from_s else p for p in programs
    )
