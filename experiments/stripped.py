"""What does it bring to pin only what comes back?    python -m experiments.stripped

Table 1's programs on the lab's A100, of a model that thinks `--factors` times its answer before it; its
template drops the thoughts, so each prompt leaves the last turn where its output began. The same policy
with and without `continuum.learn_matches`, pair by pair on the same seeds; the factor 0 is a model whose
turns come back whole. Rows are printed as they end.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import mean
from typing import Annotated

import typer

from experiments.sim.engine import simulate
from experiments.sim.result import Result
from experiments.sim.workloads import with_thoughts
from experiments.sweep.cases import Point
from experiments.sweep.simulated import programs_of, setup_of


def run(point: Point, factor: float, learns: bool) -> Result:
    """One simulated row."""
    programs = with_thoughts(programs_of(point), factor) if factor else programs_of(point)
    setup = setup_of(point, programs)
    return simulate(programs, replace(setup, continuum={**setup.continuum, "learn_matches": learns}))


def told(result: Result) -> str:
    """A row, without its name."""
    pins, tokens = result.pins, result.tokens
    return (
        f"job mean {result.mean_job_s:6.1f} s, P99 {result.job_percentile_s(99):6.1f} s, TTFT max "
        f"{result.ttft_percentile_s(100):5.1f} s, computed {tokens['computed'] / sum(tokens.values()):.3f}, "
        f"pins {pins['taken']}, reused {pins.get('reused', 0)}, reclaimed {pins.get('reclaimed', 0)}"
    )


def main(
    seeds: Annotated[str, typer.Option(help="comma-separated")] = "3,4,5,6,7",
    factors: Annotated[str, typer.Option(help="thought tokens a token of the answer")] = "8",
    programs: Annotated[int, typer.Option(min=1)] = 60,
    jps: Annotated[float, typer.Option(help="programs a second")] = 0.05,
    dram_gb: Annotated[float, typer.Option(help="0: no offloading")] = 0.0,
    tool_factor: Annotated[float, typer.Option(help="times the tools' duration")] = 1.0,
) -> None:
    """Print each pair and the mean of the ratios."""
    for factor in map(float, factors.split(",")):
        ratios = []
        for seed in map(int, seeds.split(",")):
            point = Point("continuum", programs, jps, seed, dram_gb=dram_gb, tool_factor=tool_factor)
            whole, part = (run(point, factor, learns) for learns in (False, True))
            ratios.append(whole.mean_job_s / part.mean_job_s)
            print(f"thoughts x {factor:g}, seed {seed}, whole turns    : {told(whole)}", flush=True)
            print(f"thoughts x {factor:g}, seed {seed}, what comes back: {told(part)}", flush=True)
        shown = " ".join(f"{ratio:.3f}" for ratio in ratios)
        print(f"thoughts x {factor:g}: {shown}, mean {mean(ratios):.3f} times as fast", flush=True)


if __name__ == "__main__":
    typer.run(main)
