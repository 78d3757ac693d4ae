"""Agent programs drawn from Table 1 of Continuum (arXiv 2511.02230), which has no public trace.

The table gives mean +- sd of turns, tool time and tokens a program, and says that they are
long-tailed. Every quantity is drawn lognormal, independently: it is positive and right-skewed for
any mean and sd. A gamma of the same moments is not usable for the tool time (925 +- 3,550 ms is a
shape of 0.07: half of all tools would end within 0.3 ms, which no process does; the lognormal's
median is 233 ms).

Values that the table does not give, and their sources:
- output tokens a turn: 226 +- 292, all 5,241 turns of the agentcgroup trace;
- the first prompt's share of the last prompt: 0.3 (medians 0.27, 0.30 and 0.32 in the traces
  agentcgroup, weka_claude_code and lmcache_miniswe); the rest grows in exponential steps;
- one tool, whose times do not depend on the turn: the table has no split by tool.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.workload import SHAPES, Program, TurnSpec

FIRST_PROMPT_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class Lognormal:
    """A positive, long-tailed quantity with this mean and standard deviation."""

    mean: float
    sd: float

    def draw(self, rng: np.random.Generator) -> float:
        """One value, in the unit of the mean."""
        variance = math.log1p((self.sd / self.mean) ** 2)
        return float(rng.lognormal(math.log(self.mean) - variance / 2, math.sqrt(variance)))


@dataclass(frozen=True, slots=True)
class Shape:
    """A row of Table 1."""

    turns: Lognormal
    tool_s: Lognormal
    tokens: Lognormal  # a program
    tool: str


OUTPUT_TOKENS = Lognormal(226, 292)
GENERATORS: dict[str, Shape] = {
    "swe": Shape(Lognormal(10.9, 2.1), Lognormal(0.925, 3.550), Lognormal(70_126, 19_732), "bash"),
    # BFCL v4's tokens are scaled by 0.4, as the paper does
    "bfcl": Shape(
        Lognormal(6.3, 2.3), Lognormal(1.923, 2.133), Lognormal(93_256 * 0.4, 68_687 * 0.4), "function"
    ),
}


def generate(name: str, count: int, seed: int) -> tuple[Program, ...]:
    """`count` programs of the shape `name` (a key of GENERATORS), all arriving at 0.

    The table's "tokens per program" is taken for the context at the program's end. The first programs of a
    seed are the same whatever the count. Raises KeyError for an unknown name.
    """
    return draw(GENERATORS[name], name, count, seed)


def draw(shape: Shape, name: str, count: int, seed: int) -> tuple[Program, ...]:
    """`count` programs of a shape, all arriving at 0."""
    return tuple(_draw(shape, f"{name}-{seed}-{i}", (seed, SHAPES, i)) for i in range(count))


def _draw(shape: Shape, program_id: str, seed: Sequence[int]) -> Program:
    rng = np.random.default_rng(seed)
    count = max(1, round(shape.turns.draw(rng)))
    tokens = shape.tokens.draw(rng)
    outputs = [max(1, round(OUTPUT_TOKENS.draw(rng))) for _ in range(count)]
    shares = _prompt_shares(count, rng)
    prompts = [max(1, round(share * (tokens - outputs[-1]))) for share in shares]
    gaps_s = [shape.tool_s.draw(rng) for _ in range(count - 1)]
    turns: list[TurnSpec] = []
    history = 0
    for prompt, output, gap_s in zip(prompts, outputs, [*gaps_s, None], strict=True):
        prompt = max(prompt, history + 1)  # a tool answers with at least one token
        turns.append(TurnSpec(prompt, prompt - history, output, shape.tool, "", gap_s))
        history = turns[-1].context_tokens
    return Program(program_id, 0.0, tuple(turns), f"table1-{shape.tool}")


def _prompt_shares(count: int, rng: np.random.Generator) -> list[float]:
    """Each prompt's length relative to the last one's: rising to 1.0."""
    if count == 1:
        return [1.0]
    steps = rng.exponential(1.0, count - 1)
    grown = FIRST_PROMPT_SHARE + (1 - FIRST_PROMPT_SHARE) * np.cumsum(steps) / steps.sum()
    return [FIRST_PROMPT_SHARE, *map(float, grown)]
