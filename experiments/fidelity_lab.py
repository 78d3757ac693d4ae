"""A real server's twin in the lab: the same programs, settings and tiers, on a measured machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from experiments import demo
from experiments.replay import SHARED_PREFIX_TOKENS
from experiments.selection import Selection
from experiments.sim.engine import simulate
from experiments.sim.serving import STOCK, Setup
from experiments.sim.step_time import Machine, StepCurve
from experiments.sim.workloads import with_tool_time
from experiments.workload import Program


@dataclass(frozen=True, slots=True)
class Told:
    """What a real server showed before its replay, in seconds from sending to the first token."""

    short_s: float  # of a prompt of `short_tokens`
    probe_s: float | None  # of one of `probe_tokens`; None: take the profile's word for the speed
    short_tokens: int
    probe_tokens: int

    def slower(self, machine: Machine) -> float:
        """How many times as long as the profile says computing took: the difference of two prefills."""
        if self.probe_s is None:
            return 1.0
        said_s = machine.seconds([(self.probe_tokens, 0)]) - machine.seconds([(self.short_tokens, 0)])
        return (self.probe_s - self.short_s) / said_s

    def hop_s(self, machine: Machine) -> float:
        """What a turn takes beside the engine's step: HTTP, the API server, the client."""
        return max(0.0, self.short_s - machine.seconds([(self.short_tokens, 0)]))


def slowed(machine: Machine, factor: float) -> Machine:
    """The machine with every step `factor` times as long."""
    same = ("half_rate_tokens", "samples")
    scaled = {n: getattr(machine.step, n) * factor for n in StepCurve.__slots__ if n not in same}
    return replace(machine, step=replace(machine.step, **scaled))


def lmcache_tiers() -> dict[str, Any]:
    """The demo's LMCache as the fake connector's settings: in-process, so loads and stores block."""
    gpu_gib = demo.GPU_BLOCKS * demo.BLOCK_TOKENS * demo.KV_BYTES_PER_TOKEN / 2**30
    return {
        "dram_gb": gpu_gib,
        "ssd_gb": 2 * gpu_gib,
        "chunk_tokens": demo.CHUNK_TOKENS,
        "save_decode_cache": False,  # LMCache's default
        "async": False,
    }


def predicted(
    chosen: Selection,
    machine: Machine,
    told: Told,
    policy: str,
    offloads: bool,
    step_tokens: int,
    max_seqs: int,
) -> dict[str, Any]:
    """The lab's figures for one replay, in the columns of fidelity_tables."""
    hop_s, slower = told.hop_s(machine), told.slower(machine)
    programs = behind_a_hop(with_tool_time(chosen.programs(lambda _: None), chosen.time_scale), hop_s)
    setup = Setup(
        policy=STOCK if policy == "fcfs" else policy,
        tiers=lmcache_tiers() if offloads else None,
        machine=slowed(machine, slower),
        step_tokens=step_tokens,
        max_seqs=max_seqs,
        block_tokens=demo.BLOCK_TOKENS,
        shared_tokens=SHARED_PREFIX_TOKENS,
        store_stalls=offloads,
    )
    result = simulate(programs, setup)
    jobs_s = [job.job_s + hop_s for job in result.jobs]
    tokens = result.tokens
    prompts = sum(tokens.values())
    return {
        "mean_s": float(np.mean(jobs_s)),
        "p95_s": float(np.percentile(jobs_s, 95)),
        "gpu_share": tokens["gpu"] / prompts,
        "offload_share": (tokens["dram"] + tokens["ssd"]) / prompts,
        "computed_share": tokens["computed"] / prompts,
        "hop_s": hop_s,
        "slower": slower,
    }


def behind_a_hop(programs: tuple[Program, ...], hop_s: float) -> tuple[Program, ...]:
    """The programs as the engine sees them: each turn comes `hop_s` after its client sent it."""

    def later(program: Program) -> Program:
        turns = (t if t.gap_s is None else replace(t, gap_s=t.gap_s + hop_s) for t in program.turns)
        return replace(program, turns=tuple(turns))

    return tuple(map(later, programs))
