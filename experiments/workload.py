"""Programs to replay: read from a trace, drawn from a distribution, shrunk to a window, given arrivals.

Everything random takes a seed: the same seed gives the same programs, so that policies are compared
on the same work. Traces are read by experiments/trace.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from continuum_lmcache.errors import TraceError
from experiments.trace import TraceProgram as Program
from experiments.trace import TraceTurn as TurnSpec
from experiments.trace import load_trace as load_trace

ARRIVALS, GAPS, SHAPES, SAMPLE, SESSIONS = range(5)  # which stream of a seed: draws must not share numbers


def gaps_mapped(program: Program, gap_s: Callable[[float], float]) -> Program:
    """The program with `gap_s` of each known tool gap."""
    turns = (t if t.gap_s is None else replace(t, gap_s=gap_s(t.gap_s)) for t in program.turns)
    return replace(program, turns=tuple(turns))


def growing(
    name: str, new_tokens: Sequence[int], output_tokens: Sequence[int], gap_s: float = 0.0
) -> Program:
    """A program of shell calls. Each prompt is the last one, its answer, and so many new tokens."""
    turns: list[TurnSpec] = []
    for number, (new, output) in enumerate(zip(new_tokens, output_tokens, strict=True), 1):
        prompt = new + (turns[-1].context_tokens if turns else 0)
        turns.append(TurnSpec(prompt, new, output, "bash", "ls", gap_s if number < len(new_tokens) else None))
    return Program(name, 0.0, tuple(turns))


def scaled(programs: Sequence[Program], max_context_tokens: int) -> tuple[Program, ...]:
    """The same programs, shortened so that the longest context fits `max_context_tokens`.

    One factor for all, so programs keep their proportions to each other. An exact extension of the
    history remains one; output and new tokens never fall to 0 where there were some. Programs that fit
    are returned as they are. Raises TraceError if the turns are too many for the window.
    """
    if all(program.context_tokens <= max_context_tokens for program in programs):
        return tuple(programs)
    # 2 tokens a turn: a margin for rounding new and output up, so that the bound always holds
    factor = min((max_context_tokens - 2 * len(p.turns)) / p.context_tokens for p in programs)
    if factor <= 0:
        most = max(len(program.turns) for program in programs)
        raise TraceError(f"{most} turns do not fit a context of {max_context_tokens} tokens; leave them out")
    return tuple(replace(program, turns=_shrunk(program.turns, factor)) for program in programs)


def _shrunk(turns: Iterable[TurnSpec], factor: float) -> tuple[TurnSpec, ...]:
    def shrink(tokens: int) -> int:
        return max(min(tokens, 1), round(tokens * factor))

    found: list[TurnSpec] = []
    history = history_then = 0  # the conversation's length after shrinking, and before
    for turn in turns:
        kept = history if turn.kept_tokens == history_then else min(history, shrink(turn.kept_tokens))
        new = shrink(turn.new_tokens)
        found.append(
            replace(turn, input_tokens=kept + new, new_tokens=new, output_tokens=shrink(turn.output_tokens))
        )
        history, history_then = found[-1].context_tokens, turn.context_tokens
    return tuple(found)


def poisson_arrivals(programs: Sequence[Program], jps: float, seed: int) -> tuple[Program, ...]:
    """The programs, arriving in this order as a Poisson process of `jps` programs a second."""
    waits_s = np.random.default_rng([seed, ARRIVALS]).exponential(1 / jps, len(programs))
    arrivals_s = np.cumsum(waits_s) - waits_s[:1]  # the first one arrives at 0
    return tuple(replace(p, arrival_s=float(at)) for p, at in zip(programs, arrivals_s, strict=True))


def sampled(programs: Sequence[Program], count: int, seed: int) -> tuple[Program, ...]:
    """`count` of the programs, drawn without replacement. Raises TraceError if there are fewer."""
    if count > len(programs):
        raise TraceError(f"{count} programs wanted, but there are only {len(programs)}; ask for fewer")
    chosen = np.random.default_rng([seed, SAMPLE]).choice(len(programs), count, replace=False)
    return tuple(programs[i] for i in sorted(chosen))


def unknown_gaps(programs: Iterable[Program]) -> int:
    """How many turns before another one have no tool time."""
    return sum(turn.gap_s is None for program in programs for turn in program.turns[:-1])


def with_gaps(
    programs: Sequence[Program], draw_s: Callable[[np.random.Generator], float], seed: int
) -> tuple[Program, ...]:
    """The programs with `draw_s` in place of every missing gap."""
    rng = np.random.default_rng([seed, GAPS])

    def known(program: Program) -> Program:
        between = (t if t.gap_s is not None else replace(t, gap_s=draw_s(rng)) for t in program.turns[:-1])
        return replace(program, turns=(*between, program.turns[-1]))

    return tuple(known(program) for program in programs)
