"""Programs that look like real agents', drawn from what their traces were fitted to.

The traces themselves cannot ship. fitted_programs.yaml has quantiles, shares and one correlation of the half
of each that is for tuning, and no program (records/fitted-programs.md compares them). A program is drawn so:

    turns            by their quantiles
    first prompt     by its quantiles
    growth           the program's mean new tokens a turn, correlated with its turns (a Gaussian copula),
                     times how far a turn is from its program's mean: a few turns read a whole file
    output           by its quantiles
    tool, its time   a tool by its share, then its time by that tool's own quantiles: most end at once,
                     a few last minutes
    stripped         some turns' prompts leave out the end of the last context: thinking, or a compaction;
                     where the window is full, all but the first prompt is left out

Between two quantiles a value is drawn evenly in its logarithm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import yaml

from experiments.workload import SHAPES, Program, TurnSpec

PATH = Path(__file__).with_suffix(".yaml")
LEVELS = (0.0, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
POOL, POOL_SEED = 400, 0  # programs that a run draws from, as it does from a trace's


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A positive quantity by its values at LEVELS, rising."""

    values: tuple[float, ...]

    def at(self, level: float) -> float:
        """The value at a level in [0, 1]."""
        return float(np.exp(np.interp(level, LEVELS, np.log(self.values))))

    def draw(self, rng: np.random.Generator) -> float:
        return self.at(rng.uniform())


@dataclass(frozen=True, slots=True)
class Tool:
    """How a turn ends."""

    command: str
    share: float  # of the turns
    seconds: Quantiles


@dataclass(frozen=True, slots=True)
class Shape:
    """The distributions of one trace's programs. Sizes in tokens."""

    source: str
    programs: int  # that it was fitted to
    window_tokens: int
    turns: Quantiles
    first_prompt: Quantiles
    mean_new: Quantiles  # a program's new tokens a turn
    turns_and_new: float  # the rank correlation of both
    new_over_mean: Quantiles  # a turn's new tokens over its program's mean
    output: Quantiles
    stripped_share: float  # of the later turns
    stripped: Quantiles  # of those that strip
    tools: tuple[Tool, ...]

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> Shape:
        """From the file."""
        plain = {name: row[name] for name in ("source", "programs", "window_tokens")}
        plain |= {name: row[name] for name in ("turns_and_new", "stripped_share")}
        names = ("turns", "first_prompt", "mean_new", "new_over_mean", "output", "stripped")
        tools = (Tool(t["command"], t["share"], Quantiles(tuple(t["seconds"]))) for t in row["tools"])
        return cls(**plain, **{name: Quantiles(tuple(row[name])) for name in names}, tools=tuple(tools))


@cache
def shapes() -> dict[str, Shape]:
    """By the trace's name."""
    return {name: Shape.read(row) for name, row in yaml.safe_load(PATH.read_text()).items()}


@cache
def pool(name: str) -> tuple[Program, ...]:
    """The fitted programs that stand for a trace, all arriving at 0. Raises KeyError for an unknown name."""
    return generate(shapes()[name], name, POOL, POOL_SEED)


def generate(shape: Shape, name: str, count: int, seed: int) -> tuple[Program, ...]:
    """`count` programs of a shape; the first ones of a seed are the same whatever the count."""
    return tuple(_draw(shape, f"{name}~{seed}-{i}", (seed, SHAPES, i)) for i in range(count))


def _draw(shape: Shape, program_id: str, seed: Sequence[int]) -> Program:
    rng, level = np.random.default_rng(seed), NormalDist().cdf
    one, other = rng.multivariate_normal((0, 0), [[1, shape.turns_and_new], [shape.turns_and_new, 1]])
    count, mean_new = max(1, round(shape.turns.at(level(one)))), shape.mean_new.at(level(other))
    shares = np.array([tool.share for tool in shape.tools])
    turns: list[TurnSpec] = []
    history = 0
    for number in range(count):
        output = max(1, round(shape.output.draw(rng)))
        new = shape.first_prompt.draw(rng) if not number else mean_new * shape.new_over_mean.draw(rng)
        kept = history - stripped_tokens(shape, history, rng) if number else 0
        new_tokens = max(1, round(new))
        if kept + new_tokens + output > shape.window_tokens:
            kept = min(history, turns[0].input_tokens, shape.window_tokens // 2) if turns else 0
            new_tokens = min(new_tokens, shape.window_tokens - kept - output)
        tool = shape.tools[rng.choice(len(shape.tools), p=shares / shares.sum())]
        turns.append(
            TurnSpec(kept + new_tokens, new_tokens, output, "bash", tool.command, tool.seconds.draw(rng))
        )
        history = turns[-1].context_tokens
    last = turns.pop()
    turns.append(TurnSpec(last.input_tokens, last.new_tokens, last.output_tokens, last.tool))
    return Program(program_id, 0.0, tuple(turns), f"fitted {shape.source}")


def stripped_tokens(shape: Shape, history: int, rng: np.random.Generator) -> int:
    """Tokens at the end of the last turn's context that the next prompt leaves out."""
    if rng.uniform() >= shape.stripped_share:
        return 0
    return min(history, round(shape.stripped.draw(rng)))
