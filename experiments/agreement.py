"""Do two simulators that were written apart agree? One point of the DRAM figure, choice by choice.

    python -m experiments.agreement --seeds 1..5
    python -m experiments.agreement --seeds 1..3 --choices blocks-16,tools-4,prompt-kv-only

The other one ran vLLM's scheduler too, and was described in words: an A100 with Llama-3.1-8B, 480,000
tokens of KV, DRAM of 100 GB, 80 programs, 0.05 a second. Its draws cannot be repeated, so what compares
is a ratio to program order on the same seed; means are printed with their standard error. Each choice
that its description leaves open changes one thing at a time against `base`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python PATH` as well as -m

from experiments.offload_sweep import seeds_of
from experiments.sim.engine import simulate
from experiments.sim.serving import STOCK, Setup
from experiments.sweep.cases import SweepError
from experiments.table1 import Lognormal
from experiments.tables import markdown, plain
from experiments.workload import Program, TurnSpec, poisson_arrivals

POLICIES = ("fcfs", "program-fcfs", "continuum", "infercept")
BASELINE = "program-fcfs"
TOLD_S = {"fcfs": 1361.0, "program-fcfs": 407.0, "continuum": 401.0, "infercept": 395.0}
"""The other simulator's mean job times, the mean of its seeds 1 to 3."""
PROGRAMS, JPS = 80, 0.05
ONE_TOOL = {"bash": (1.0, Lognormal(0.869, 3.816))}
FOUR_TOOLS = {  # shares and times are invented; together they have about the one tool's moments
    "cat": (0.4, Lognormal(0.08, 0.05)),
    "sed": (0.3, Lognormal(0.2, 0.2)),
    "python": (0.2, Lognormal(0.8, 1.0)),
    "pytest": (0.1, Lognormal(6.2, 10.5)),
}


@dataclass(frozen=True, slots=True)
class Choice:
    """One reading of what the description leaves open."""

    setup: dict[str, Any] = field(default_factory=dict)
    tiers: dict[str, Any] = field(default_factory=dict)
    continuum: dict[str, Any] = field(default_factory=dict)
    tools: dict[str, tuple[float, Lognormal]] = field(default_factory=lambda: ONE_TOOL)


CHOICES = {
    "base": Choice(),
    "blocks-16": Choice(setup={"block_tokens": 16}),
    "steps-one-by-one": Choice(setup={"merge_steps": 1}),
    "retry-blocked-heads": Choice(setup={"skip_blocked": False}),
    "prompt-kv-only": Choice(tiers={"save_decode_cache": False}),
    "tools-4": Choice(tools=FOUR_TOOLS),
    "wait-without-end": Choice(continuum={"max_wait_s": 1e9}),
    "pins-fill-the-gpu": Choice(continuum={"max_pinned_share": 1.0}),
}


def programs(seed: int, choice: Choice) -> tuple[Program, ...]:
    """The description's programs: the same for every policy and setup of a seed."""
    drawn = [_program(seed, at, choice.tools) for at in range(PROGRAMS)]
    return poisson_arrivals(drawn, JPS, seed)


def _program(seed: int, at: int, tools: dict[str, tuple[float, Lognormal]]) -> Program:
    """10.9 +- 2.1 turns; a context of 6,000 to 14,000 tokens that grows to 70,400 +- 19,900."""
    rng = np.random.default_rng((seed, 77, at))
    count = max(2, round(rng.normal(10.9, 2.1)))
    last = max(18_000.0, rng.normal(70_400, 19_900))
    outputs = [int(rng.integers(100, 301)) for _ in range(count)]
    first = rng.uniform(6000, 14_000)
    steps = np.cumsum(rng.exponential(1.0, count - 1))
    prompts = [round(first), *(round(first + (last - outputs[-1] - first) * s / steps[-1]) for s in steps)]
    names, shares = list(tools), [share for share, _ in tools.values()]
    turns: list[TurnSpec] = []
    for prompt, output in zip(prompts, outputs, strict=True):
        history = turns[-1].context_tokens if turns else 0
        prompt = max(prompt, history + 1)
        tool = names[rng.choice(len(names), p=shares)] if len(names) > 1 else names[0]
        turns.append(TurnSpec(prompt, prompt - history, output, tool, "", tools[tool][1].draw(rng)))
    return Program(f"a{seed}-{at}", 0.0, (*turns[:-1], replace(turns[-1], gap_s=None)))


def mean_job_s(policy: str, seed: int, choice: Choice) -> float:
    """One run of the lab."""
    tiers = {"dram_gb": 100.0, "async": True, **choice.tiers}
    setup = replace(Setup(tiers=tiers, merge_steps=8), **choice.setup)
    if policy == "fcfs":
        return simulate(programs(seed, choice), replace(setup, policy=STOCK)).mean_job_s
    setup = replace(setup, policy=policy, continuum=choice.continuum)
    return simulate(programs(seed, choice), setup).mean_job_s


def table(found: dict[tuple[str, str], list[float]]) -> list[list[str]]:
    """A line per choice and policy; `found` has a mean per seed."""
    lines = [["", "", "mean job, s", "the other's", "over it", "x program order", "the other's"]]
    for (choice, policy), means_s in found.items():
        base_s = found[choice, BASELINE]
        ratios = [mine / base for mine, base in zip(means_s, base_s, strict=True)]
        told_s = TOLD_S[policy]
        over = f"{100 * (fmean(means_s) / told_s - 1):+.0f} %"
        told = f"{told_s / TOLD_S[BASELINE]:.3f}"
        lines.append(
            [choice, policy, with_error(means_s, 0), f"{told_s:.0f}", over, with_error(ratios, 3), told]
        )
    return lines


def with_error(values: Sequence[float], digits: int) -> str:
    """The mean, and the standard error of it where there are several."""
    error = f" +- {stdev(values) / sqrt(len(values)):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):,.{digits}f}{error}"


def main(
    seeds: Annotated[str, typer.Option(help="1..5, or 1,4")] = "1..5",
    choices: Annotated[str, typer.Option(help=f"Of {', '.join(CHOICES)}.")] = "base",
    policies: Annotated[str, typer.Option(help="Beside program-fcfs.")] = ",".join(POLICIES),
) -> None:
    """Print the table."""
    try:
        wanted, chosen = choices.split(","), seeds_of(seeds)
        if unknown := [name for name in wanted if name not in CHOICES]:
            raise SweepError(f"choice {unknown[0]!r} is not known; known: {', '.join(CHOICES)}")
        names = [policy for policy in POLICIES if policy in {BASELINE, *policies.split(",")}]
        if unknown := [name for name in policies.split(",") if name not in POLICIES]:
            raise SweepError(f"policy {unknown[0]!r} was not told of; known: {', '.join(POLICIES)}")
    except SweepError as error:
        raise SystemExit(f"agreement: {error}") from error
    found = {
        (choice, policy): [mean_job_s(policy, seed, CHOICES[choice]) for seed in chosen]
        for choice, policy in tqdm([(c, p) for c in wanted for p in names], unit="row")
    }
    lines = table(found)
    Console(width=120).print(plain(lines, f"{PROGRAMS} programs, {JPS} a second, seeds {seeds}"))
    print(markdown(lines))


if __name__ == "__main__":
    typer.run(main)
