"""Runs a Point in the simulator: its programs, its setup, and its figures."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean
from typing import Any

from experiments import policies
from experiments.sim.engine import simulate
from experiments.sim.result import Result
from experiments.sim.serving import STOCK as STOCK_POLICY
from experiments.sim.serving import Setup
from experiments.sim.step_time import MACHINES, TIER_STEP_S, Machine
from experiments.sim.trace_programs import arriving, half
from experiments.sim.workloads import SMALL_SHAPES, seeds_sweep, with_tool_time
from experiments.sweep.cases import (
    ENDLESS,
    GATE,
    PEERS,
    STOCK,
    Point,
    SweepError,
)
from experiments.table1 import GENERATORS, draw
from experiments.workload import Program, poisson_arrivals

SHAPES = GENERATORS | SMALL_SHAPES
TRACE = "trace:"  # then its name and half (sim/trace_programs.py)
SWEEP = "seeds-sweep"  # the published sweep brings its own arrivals: `programs` is not asked
SHARED_TOKENS = {SWEEP: 64}  # of the prompts that all programs begin with; else the simulator's


def run(point: Point) -> dict[str, Any]:
    """Simulate the point and return its figures (rows.FIGURES). Raises SweepError for unknown names."""
    programs = programs_of(point)
    return figures(simulate(programs, setup_of(point, programs)))


def programs_of(point: Point) -> tuple[Program, ...]:
    """The same programs for every contender of a seed."""
    if point.workload.startswith(TRACE):
        programs = arriving(traced(point), point.programs, point.load, point.seed, machine_of(point))
    elif point.workload == SWEEP:
        programs = seeds_sweep(point.jps, point.seed)
    elif point.workload in SHAPES:
        drawn = draw(SHAPES[point.workload], point.workload, point.programs, point.seed)
        programs = poisson_arrivals(drawn, point.jps, point.seed)
    else:
        known = ", ".join([*SHAPES, SWEEP])
        raise SweepError(f"workload is {point.workload!r}; known: {known}")
    return with_tool_time(programs, point.tool_factor, point.tool_from_s)


def setup_of(point: Point, programs: tuple[Program, ...]) -> Setup:
    """The engine of the point."""
    machine = machine_of(point)
    if point.kv_contexts:
        contexts = [p.context_tokens for p in traced(point)]
        fits_all = max(contexts) + Setup().block_tokens
        machine = replace(machine, kv_tokens=max(fits_all, int(point.kv_contexts * mean(contexts))))
    if point.offloads:
        longer_s = machine.step.fixed_s + TIER_STEP_S.get(machine.name, 0.0)
        machine = replace(machine, step=replace(machine.step, fixed_s=longer_s))
    if point.contender == ENDLESS:
        machine = replace(machine, kv_tokens=sum(p.context_tokens + 64 for p in programs))
    setup = Setup(
        policy=policy_of(point.contender),
        tiers=tiers_of(point, machine),
        machine=machine,
        step_tokens=point.step_tokens,
        max_seqs=point.max_seqs,
        merge_steps=point.merge_steps,
        wrong_hints=point.wrong_hints,
        untold_ends=point.untold_ends,
        gate=point.contender == GATE,
        continuum={} if point.max_ttl_s is None else {"max_ttl_s": point.max_ttl_s},
    )
    return replace(setup, shared_tokens=SHARED_TOKENS.get(point.workload, setup.shared_tokens))


def traced(point: Point) -> tuple[Program, ...]:
    """The half of a trace that the point's programs are drawn from. Raises TraceError if it names none."""
    name, _, part = point.workload.removeprefix(TRACE).partition(":")
    return half(name, part)


def machine_of(point: Point) -> Machine:
    """The card, before its memory is set."""
    if point.machine not in MACHINES:
        raise SweepError(f"machine is {point.machine!r}; known: {', '.join(MACHINES)}")
    return MACHINES[point.machine]


def policy_of(contender: str) -> str:
    """The simulator's name of a contender's policy."""
    if contender in PEERS:
        return contender
    special = {STOCK: STOCK_POLICY, GATE: STOCK_POLICY, ENDLESS: "program-fcfs"}
    if contender in special:
        return special[contender]
    if ":" not in contender and contender not in policies.known():
        known = ", ".join([*special, *PEERS, *policies.known()])
        raise SweepError(f"contender is {contender!r}; known: {known}")
    return contender


def tiers_of(point: Point, machine: Machine) -> dict[str, Any] | None:
    """The fake connector's settings; None without offloading."""
    if not point.offloads or point.contender == ENDLESS:
        return None
    kv_gb = machine.kv_tokens * machine.kv_bytes_per_token / 1e9
    tiers: dict[str, Any] = {
        "dram_gb": point.dram_gb or point.dram_kv * kv_gb,
        "ssd_gb": point.ssd_gb or point.ssd_kv * kv_gb,
    }
    if point.ssd_gbps is not None:
        tiers["ssd_load_gbps"] = point.ssd_gbps
    return tiers


def figures(result: Result) -> dict[str, Any]:
    """A row's figures of a run: seconds, tokens, counts."""
    ttfts_s = [turn.ttft_s for turn in result.turns]
    cold = max(1, len(result.jobs) // 4)  # of the arrivals: nothing was learned and nothing is full
    jobs_s = [job.job_s for job in result.jobs]
    pins = {f"pins_{name}": result.pins.get(name, 0) for name in ("taken", "reused", "expired", "reclaimed")}
    return {
        "job_mean_s": result.mean_job_s,
        "job_mean_cold_s": mean(jobs_s[:cold]),
        "job_mean_warm_s": mean(jobs_s[cold:] or jobs_s),
        **{f"job_p{p}_s": result.job_percentile_s(p) for p in (50, 90, 95, 99)},
        "ttft_mean_s": sum(ttfts_s) / len(ttfts_s),
        "ttft_p99_s": result.ttft_percentile_s(99),
        "ttft_max_s": max(ttfts_s),
        "end_s": result.end_s,
        "jobs": len(result.jobs),
        "jobs_per_s": len(result.jobs) / result.end_s,
        "busy_share": result.busy_s / result.end_s,
        **{f"{source}_tokens": tokens for source, tokens in result.tokens.items()},
        "scheduled_tokens": result.scheduled_tokens,
        "steps": result.steps,
        "preemptions": result.preemptions,
        **pins,
        "measured": result.measured,
    }
