"""Programs for a fleet: few large ones hold most of the tokens, and they arrive in bursts.

`skew` has the shape of an operator's agentic trace of 1.3 million sessions: the largest 10 % of programs hold
about 61 to 65 % of all prompt tokens there and here; the largest 1 % 46 % there and 13 to 18 % here. Its tool
gaps are drawn from that trace's quantiles and cut at LONGEST_GAP_S.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from experiments.sim.step_time import Machine
from experiments.sim.trace_programs import work_s
from experiments.table1 import Lognormal, Shape, draw
from experiments.workload import ARRIVALS, GAPS, SAMPLE, Program, TurnSpec

LONGEST_GAP_S = 120.0
GAP_LEVELS = (0.0, 0.25, 0.39, 0.5, 0.67, 0.87, 0.9, 0.99, 1.0)
GAPS_S = (0.05, 0.69, 1.0, 1.6, 5.0, 30.0, 44.0, 738.0, 3600.0)  # n = 783,000
CALM, BURST = (0.6, 160.0), (2.6, 40.0)  # times the mean rate, and for how long on average: a mean of 1.0
DECODE_BATCH = 6  # turns that decode together, for the load
VARIES = 0.3  # of a size's mean within a class


@dataclass(frozen=True, slots=True)
class Class:
    """Programs of one size."""

    share: float  # of the programs
    turns: float
    context_tokens: float  # at the end


CLASSES = (Class(0.6, 4, 8_000), Class(0.3, 12, 45_000), Class(0.1, 28, 110_000))
MOST_TOKENS = 126_000  # a context that fits the model's window


def skewed(count: int, seed: int) -> tuple[Program, ...]:
    """`count` programs, all arriving at 0; the first ones of a seed are the same whatever the count."""
    picks = np.random.default_rng([seed, SAMPLE]).choice(len(CLASSES), count, p=[c.share for c in CLASSES])
    found: list[Program] = []
    for at, pick in enumerate(picks):
        turns, tokens = CLASSES[pick].turns, CLASSES[pick].context_tokens
        shape = Shape(
            Lognormal(turns, VARIES * turns), Lognormal(1.0, 1.0), Lognormal(tokens, VARIES * tokens), "bash"
        )
        [program] = draw(shape, f"skew-{seed}-{at}", 1, 1000 * seed + at)
        found.append(_bounded(replace(program, program_id=f"skew-{seed}-{at}")))
    return with_gaps_of_the_trace(found, seed)


def _bounded(program: Program) -> Program:
    """Without the turns that would not fit the window."""
    fitting = [turn for turn in program.turns if turn.context_tokens <= MOST_TOKENS] or [
        _cut(program.turns[0])
    ]
    return replace(program, turns=(*fitting[:-1], replace(fitting[-1], gap_s=None)))


def _cut(turn: TurnSpec) -> TurnSpec:
    tokens = MOST_TOKENS - turn.output_tokens
    return replace(turn, input_tokens=tokens, new_tokens=tokens)


def with_gaps_of_the_trace(programs: Sequence[Program], seed: int) -> tuple[Program, ...]:
    """The same programs with other tool gaps, each drawn log-uniformly between two quantiles."""
    rng = np.random.default_rng([seed, GAPS])

    def drawn(program: Program) -> Program:
        levels = rng.uniform(size=len(program.turns))
        gaps_s = np.exp(np.interp(levels, GAP_LEVELS, np.log(GAPS_S)))
        turns = [
            replace(turn, gap_s=min(float(gap_s), LONGEST_GAP_S))
            for turn, gap_s in zip(program.turns, gaps_s, strict=True)
        ]
        return replace(program, turns=(*turns[:-1], replace(turns[-1], gap_s=None)))

    return tuple(map(drawn, programs))


def rate_of(programs: Sequence[Program], rho: float, machine: Machine, nominal_replicas: float) -> float:
    """Programs a second that bring `rho` times the work that this many replicas can do.

    Nothing is computed twice, and DECODE_BATCH turns decode together: a fleet reaches 1.0 only at its best.
    """
    mean_work_s = sum(work_s(program, machine, DECODE_BATCH) for program in programs) / len(programs)
    return rho * nominal_replicas / mean_work_s


def bursts(programs: Sequence[Program], jps: float, seed: int) -> tuple[Program, ...]:
    """The programs, arriving at `jps` a second on average: a slow phase, a burst, a slow phase."""
    rng = np.random.default_rng([seed, ARRIVALS])
    (times, mean_s), other = CALM, BURST
    at_s, ends_s = 0.0, float(rng.exponential(mean_s))
    found = []
    for program in programs:
        found.append(replace(program, arrival_s=at_s))  # the first one arrives at 0
        wait = float(rng.exponential())  # in mean gaps: the rate may change before it is over
        while at_s + wait / (times * jps) > ends_s:
            wait -= (ends_s - at_s) * times * jps
            at_s, (times, mean_s), other = ends_s, other, (times, mean_s)
            ends_s += float(rng.exponential(mean_s))
        at_s += wait / (times * jps)
    return tuple(found)


def alone_s(program: Program, machine: Machine) -> float:
    """How long the program takes on an idle replica that keeps its KV, tools included."""
    return work_s(program, machine, 1) + sum(turn.gap_s or 0.0 for turn in program.turns)
