"""Runs a FleetPoint in the simulator: its programs, its replicas and its router."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from experiments.fleet.figures import figures
from experiments.fleet.named import ROUTERS
from experiments.fleet.run import FleetResult, FleetSetup, run_fleet
from experiments.fleet.workloads import bursts, rate_of, skewed, with_gaps_of_the_trace
from experiments.sim.serving import STOCK as STOCK_POLICY
from experiments.sim.serving import Setup
from experiments.sim.step_time import MACHINES, Machine
from experiments.sim.trace_programs import FITTED, drawn, half
from experiments.sweep.cases import STOCK, FleetPoint, SweepError
from experiments.sweep.simulated import policy_of
from experiments.table1 import GENERATORS, draw
from experiments.workload import Program

SKEW, SWE = "skew", "swe"
DEMANDED = 400  # programs that the load is reckoned from, whatever a run takes of them


def run(point: FleetPoint) -> dict[str, Any]:
    """Simulate the point and return its figures (rows.FLEET_FIGURES). Raises SweepError for unknown names."""
    found, programs = simulated(point)
    return figures(found, programs, MACHINES[point.machine], point.replicas, point.cool_s)


def simulated(point: FleetPoint) -> tuple[FleetResult, tuple[Program, ...]]:
    """The run itself, and its programs."""
    if point.router not in ROUTERS:
        raise SweepError(f"router is {point.router!r}; known: {', '.join(ROUTERS)}")
    programs = programs_of(point)
    return run_fleet(programs, setup_of(point), ROUTERS[point.router](point)), programs


def programs_of(point: FleetPoint) -> tuple[Program, ...]:
    """The same programs for every router of a seed, arriving in bursts at the load's rate."""
    machine = machine_of(point)
    many = of_workload(point, max(DEMANDED, point.programs))
    jps = rate_of(many, point.rho, machine, point.replicas - 1 + point.slow)
    return bursts(many[: point.programs], jps, point.seed)


def of_workload(point: FleetPoint, count: int) -> tuple[Program, ...]:
    """`count` programs, all arriving at 0."""
    if point.workload == SKEW:
        return skewed(count, point.seed, point.skew)
    if point.workload == SWE:
        return with_gaps_of_the_trace(draw(GENERATORS[SWE], SWE, count, point.seed), point.seed)
    kind, _, name = point.workload.partition(":")
    if kind != FITTED:
        raise SweepError(f"workload is {point.workload!r}; known: {SKEW}, {SWE}, {FITTED}:NAME of a trace")
    return drawn(half(name, FITTED), count, point.seed)


def machine_of(point: FleetPoint) -> Machine:
    if point.machine not in MACHINES:
        raise SweepError(f"machine is {point.machine!r}; known: {', '.join(MACHINES)}")
    machine = MACHINES[point.machine]
    return replace(machine, kv_tokens=int(machine.kv_tokens * point.kv_share))


def setup_of(point: FleetPoint) -> FleetSetup:
    """The replicas of the point."""
    engine = Setup(
        policy=STOCK_POLICY if point.engine == STOCK else policy_of(point.engine),
        tiers={"dram_gb": point.dram_gb, "async": True},
        machine=machine_of(point),
        merge_steps=point.merge_steps,
    )
    return FleetSetup(
        engine=engine,
        speeds=(*(1.0 for _ in range(point.replicas - 1)), point.slow),
        pool=point.pool,
        link_gbps=point.link_gbps,
        starts_known=point.starts_known,
        dies_at_s=point.dies_at_s,
    )
