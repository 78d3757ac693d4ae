"""Mixed traffic: questions of one turn, without a name, beside agents; the first tokens of each, simulated.

    python -m experiments.mixed                         three contenders, two tiers, seeds 3 to 5

As much agents' work arrives as an A100 can do, with KV for six contexts; the agents are drawn from what was
fitted to Claude Code on SWE tasks. Questions arrive beside them, as many a second as --questions says, until
the last agent has arrived. So the card has more to do than it can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Annotated

import numpy as np
import typer

from experiments.offload_sweep import seeds_of
from experiments.sim.engine import simulate
from experiments.sim.result import TurnResult
from experiments.sim.workloads import SMALL_SHAPES
from experiments.sweep.cases import STOCK, Point
from experiments.sweep.grids import CODING, KV_CONTEXTS, TIERS, named
from experiments.sweep.simulated import programs_of, setup_of
from experiments.table1 import draw
from experiments.tables import publish
from experiments.workload import Program, poisson_arrivals

CONTENDERS = (STOCK, "continuum-published", "continuum")
QUESTION = "chat"  # of SMALL_SHAPES
PERCENTILES = (50, 90, 99, 100)
HEAD = ["tier", "contender"]
HEAD += [
    f"{who}, {what}"
    for who in ("questions", "agents")
    for what in ("P50, s", "P90", "P99", "longest", "mean")
]
HEAD += ["agents' mean job time, s"]


def questions(agents: Sequence[Program], per_s: float, seed: int) -> tuple[Program, ...]:
    """Requests of one turn that name nothing, until the last agent arrives."""
    end_s = max(program.arrival_s for program in agents)
    drawn = draw(SMALL_SHAPES[QUESTION], QUESTION, int(end_s * per_s), seed)
    return tuple(replace(p, source="unnamed") for p in poisson_arrivals(drawn, per_s, seed + 1))


def first_tokens(turns: Sequence[TurnResult]) -> list[float]:
    """P50, P90, P99, longest and mean wait, seconds."""
    waits_s = [turn.ttft_s for turn in turns]
    return [*np.percentile(waits_s, PERCENTILES).tolist(), mean(waits_s)]


def run(point: Point, per_s: float) -> list[float]:
    """First tokens of the questions, then of the agents' turns, and the agents' mean job time; seconds."""
    agents = programs_of(point)
    asked = questions(agents, per_s, point.seed)
    ran = simulate((*agents, *asked), setup_of(point, agents))
    single = {program.program_id for program in asked}
    parts = ([t for t in ran.turns if (t.program_id in single) is is_single] for is_single in (True, False))
    jobs_s = [job.job_s for job in ran.jobs if job.program_id not in single]
    return [*(value for part in parts for value in first_tokens(part)), mean(jobs_s)]


def main(
    per_s: Annotated[float, typer.Option("--questions", min=1e-3, help="a second")] = 0.5,
    agents: Annotated[int, typer.Option(min=1, help="programs")] = 24,
    seeds: Annotated[str, typer.Option(help="1..5, or 1,4,7")] = "3..5",
    tiers: Annotated[str, typer.Option(help=f"of {', '.join(TIERS)}")] = "none,DRAM",
    out: Annotated[Path, typer.Option(help="where the table goes")] = Path("results"),
) -> None:
    """Simulate, and print a table: means over the seeds."""
    workload = f"trace:{CODING}:fitted"
    base = Point(
        STOCK, agents, 0.0, 0, workload, load=1.0, kv_contexts=KV_CONTEXTS, untold_ends=True, merge_steps=8
    )
    lines = [HEAD]
    for tier, name in product(named(tiers, TIERS, "--tiers"), CONTENDERS):
        point = replace(base, contender=name, dram_kv=TIERS[tier][0], ssd_kv=TIERS[tier][1])
        found = [run(replace(point, seed=seed), per_s) for seed in seeds_of(seeds)]
        lines.append([tier, name, *(f"{mean(values):.1f}" for values in zip(*found, strict=True))])
    title = f"{agents} agents and {per_s:g} questions a second, seeds {seeds}; simulated"
    publish(lines, title, [], out / "mixed")


if __name__ == "__main__":
    typer.run(main)
