"""What pins that cost nothing while nobody waits are worth.    python -m experiments.scarcity --seeds 3..7

Each regime in the lab with `continuum.priced_pins` off and on, seed by seed (an assumed A100, 60 programs,
decode steps merged). Ratio of mean job times, off / on: above 1 the priced pins are faster. Preemptions
are of the second run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean
from typing import Annotated

import typer
from rich.console import Console

from experiments.offload_sweep import seeds_of
from experiments.sim.engine import simulate
from experiments.sim.result import Result
from experiments.sweep.cases import Point
from experiments.sweep.goals import OURS, papers
from experiments.sweep.simulated import programs_of, setup_of
from experiments.tables import plain


def run(point: Point, priced: bool) -> Result:
    """One run of ours."""
    programs = programs_of(point)
    setup = setup_of(point, programs)
    return simulate(programs, replace(setup, continuum={**setup.continuum, "priced_pins": priced}))


def line(regime: str, point: Point, seeds: Sequence[int]) -> list[str]:
    """A regime's figures."""
    pairs = [[run(replace(point, seed=seed), priced) for priced in (False, True)] for seed in seeds]
    ratios = [off.mean_job_s / on.mean_job_s for off, on in pairs]
    tails = [on.job_percentile_s(99) / off.job_percentile_s(99) for off, on in pairs]
    return [
        regime,
        " ".join(f"{off.mean_job_s:.0f}>{on.mean_job_s:.0f}" for off, on in pairs),
        f"{mean(ratios):.3f} ({min(ratios):.3f})",
        f"{mean(tails):.3f}",
        " ".join(str(on.preemptions) for _, on in pairs),
    ]


def main(
    regimes: Annotated[list[str] | None, typer.Argument(help="parts of their names")] = None,
    seeds: Annotated[str, typer.Option(help="3..7, or 1,2")] = "3..7",
    programs: Annotated[int, typer.Option(min=1)] = 60,
) -> None:
    """Print the table."""
    chosen = [g for g in papers(programs) if not regimes or any(part in g.regime for part in regimes)]
    header = ["", "mean job time, s", "off / on (worst seed)", "P99, on / off", "preemptions"]
    rows = [line(g.regime, replace(g.ours, contender=OURS), seeds_of(seeds)) for g in chosen]
    Console(width=160).print(plain([header, *rows], f"Priced pins, seeds {seeds}"))


if __name__ == "__main__":
    typer.run(main)
