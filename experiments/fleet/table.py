"""The routers on one workload, over stock engines and ours.    python -m experiments.fleet.table

Four replicas, the last at 0.6 of the speed, of an A100 by its data sheet, with DRAM of 20 GB each; skewed
programs in bursts (workloads.py), at `rho` times the load that the GPUs can take. KV follows a program over a
link of 12.5 GB/s where the router migrates it. 200 programs take about 15 s a run.
"""

from __future__ import annotations

from statistics import mean, median
from typing import Annotated

import typer

from experiments.fleet.routers import ROUTERS
from experiments.fleet.run import FleetResult, FleetSetup, run_fleet
from experiments.fleet.workloads import alone_s, bursts, rate_of, skewed
from experiments.sim.result import percentile
from experiments.sim.serving import STOCK, Setup
from experiments.sim.step_time import MACHINES
from experiments.tables import markdown
from experiments.workload import Program

MACHINE = MACHINES["a100"]
SPEEDS = (1.0, 1.0, 1.0, 0.6)
DEMANDED = 400  # programs that the load is reckoned from, whatever a run takes of them
LINK_GBPS = {"affinity": 12.5, "moves": 12.5, "ear": 12.5}  # of EAR and its ablation
HEADER = (
    *("engines", "router", "mean job, s", "TTFT P90 of replicas: median, max, s", "P99 of later TTFT, s"),
    *("amplification", "moved", "right", "thrash"),
)


def programs_of(count: int, rho: float, seed: int) -> tuple[Program, ...]:
    """The same programs for every router of a seed, arriving in bursts at the load's rate."""
    many = skewed(max(DEMANDED, count), seed)
    return bursts(many[:count], rate_of(many, rho, MACHINE, sum(SPEEDS)), seed)


def setup_of(policy: str, router: str) -> FleetSetup:
    """The replicas; `policy`: STOCK, or a name in policies.POLICIES."""
    tiers = {"dram_gb": 20.0}
    engine = Setup(policy=policy, tiers=tiers, machine=MACHINE, merge_steps=32)
    return FleetSetup(engine, SPEEDS, LINK_GBPS.get(router, 0.0))


def line(policy: str, router: str, runs: list[tuple[FleetResult, tuple[Program, ...]]]) -> list[str]:
    """A router's figures: means over the seeds."""
    found = [run for run, _ in runs]
    by_replica = [run.ttft_p90_s() for run in found]
    later_s = [[t.ttft_s for t in run.result.turns if t.number > 1] for run in found]
    alone = [max(p.arrival_s + alone_s(p, MACHINE) for p in programs) for _, programs in runs]
    amplified = [run.result.end_s / end_s for run, end_s in zip(found, alone, strict=True)]
    turns, moves = (
        sum(len(each) for each in all_)
        for all_ in ([r.result.turns for r in found], [r.moves for r in found])
    )
    return [
        policy,
        router,
        f"{mean(run.result.mean_job_s for run in found):.1f}",
        f"{mean(map(median, by_replica)):.1f}, {mean(map(max, by_replica)):.1f}",
        f"{mean(percentile(values, 99) for values in later_s):.1f}",
        f"{mean(amplified):.2f}",
        f"{moves / turns:.1%}",
        f"{mean(run.accurate_share() for run in found):.0%}" if moves else "",
        f"{sum(run.thrash() for run in found)}",
    ]


def main(
    programs: int = 200,
    rho: float = 1.3,
    seed: Annotated[list[int], typer.Option(help="may be given several times")] = [3],  # noqa: B006
    router: Annotated[list[str], typer.Option(help=", ".join(ROUTERS))] = [*ROUTERS],  # noqa: B006
    engine: Annotated[list[str], typer.Option(help="policies of the engines")] = [STOCK, "continuum"],  # noqa: B006
) -> None:
    """Run, and print the table in Markdown."""
    if unknown := set(router) - ROUTERS.keys():
        raise typer.BadParameter(f"unknown router {min(unknown)!r}; known: {', '.join(ROUTERS)}")
    lines = [list(HEADER)]
    for policy in engine:
        for name in router:
            runs = []
            for number in seed:
                drawn = programs_of(programs, rho, number)
                runs.append((run_fleet(drawn, setup_of(policy, name), ROUTERS[name]()), drawn))
            lines.append(line(policy, name, runs))
    print(markdown(lines))


if __name__ == "__main__":
    typer.run(main)
