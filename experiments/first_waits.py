"""Compares settings that trade the longest TTFT against job time, with vLLM's fcfs as the baseline.

    python -m experiments.first_waits --programs 40 --seeds 3..5

The live runs under memory pressure (`offload_sweep pressure --engine live`) in the simulator: the same
programs, tiers and proportions, on the measured machine, without a server's overhead. All loads and stores
delay the step, as with LMCache in-process. `endless-gpu` is program order on a KV cache that never
fills: what memory alone can gain; another order may still be faster.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python PATH` as well as -m

from experiments.calibrated_simulator import lmcache_tiers
from experiments.offload_sweep import seeds_of
from experiments.replay import SHARED_PREFIX_TOKENS
from experiments.sim.engine import simulate
from experiments.sim.result import Result
from experiments.sim.serving import Setup
from experiments.sim.step_time import Machine
from experiments.sim.workloads import with_tool_time
from experiments.sweep.cases import ENDLESS, STOCK, Live, SweepError
from experiments.sweep.live import ROOT, machine_of, selection_of
from experiments.sweep.live_plans import KV_GB, SMALL
from experiments.sweep.runner import refuse_settings
from experiments.sweep.simulated import policy_of
from experiments.tables import markdown, spread
from experiments.tiny_model import PROFILES

STEP_TOKENS = 2048  # vLLM's default on such a machine
DTYPE = "bfloat16"  # whatever this CPU computes in
DISKS_GB = {"DRAM alone": 0.0, "and a disk": 2 * KV_GB}
OURS = "continuum"
SETTINGS: Mapping[str, Mapping[str, Any]] = {  # ours, where the name is no contender's
    **{contender: {} for contender in (STOCK, "continuum-published", ENDLESS, OURS)},
    "... both bounds 10 s": {"admission_max_hold_s": 10.0, "pin_reclaim_after_s": 10.0},
    "... both bounds 3 s": {"admission_max_hold_s": 3.0, "pin_reclaim_after_s": 3.0},
    "... admission=false": {"admission": False},
}


def simulated_replica(case: Live, settings: Mapping[str, Any]) -> Result:
    """The case in the simulator. Raises SweepError for unknown names."""
    machine, chosen = replace(machine_of(case), dtype=DTYPE, profile=PROFILES[DTYPE]), selection_of(case)
    profile = yaml.safe_load((ROOT / "profiles" / machine.profile).read_text())
    programs = with_tool_time(chosen.programs(lambda _: None), chosen.time_scale)
    kv_tokens = machine.gpu_blocks * machine.block_tokens
    tiers = lmcache_tiers(machine.gib(case.dram_gb), machine.gib(case.ssd_gb), machine.chunk_tokens)
    if is_endless := case.contender == ENDLESS:
        kv_tokens = sum(program.context_tokens + machine.block_tokens for program in programs)
    setup = Setup(
        policy=policy_of(case.contender),
        tiers=None if is_endless else tiers,
        machine=Machine.from_profile(profile, machine.profile, kv_tokens),
        step_tokens=STEP_TOKENS,
        block_tokens=machine.block_tokens,
        shared_tokens=SHARED_PREFIX_TOKENS,
        store_stalls=True,
        continuum=dict(settings),
    )
    return simulate(programs, setup)


def figures(case: Live, settings: Mapping[str, Any]) -> tuple[float, float]:
    """Mean job time and the longest TTFT, in s."""
    result = simulated_replica(case, settings)
    return result.mean_job_s, max(turn.ttft_s for turn in result.turns)


def lines(base: Live, seeds: Sequence[int], workers: int) -> list[list[str]]:
    """A header, then a line per tiers and setting: how many times fcfs's, and each seed's job time."""
    found = [["tiers", "", "mean job time, fcfs / this", "longest TTFT, this / fcfs", "mean job time, s"]]
    with ProcessPoolExecutor(workers) as pool:
        for tiers, disk_gb in DISKS_GB.items():
            runs = {}
            for name, settings in SETTINGS.items():
                contender = OURS if settings else name
                cases = [replace(base, contender=contender, seed=seed, ssd_gb=disk_gb) for seed in seeds]
                runs[name] = list(pool.map(partial(figures, settings=settings), cases))
            for name, these in runs.items():
                pairs = list(zip(runs[STOCK], these, strict=True))
                faster = spread([stock[0] / this[0] for stock, this in pairs])
                later = spread([this[1] / stock[1] for stock, this in pairs])
                found.append([tiers, name, faster, later, " ".join(f"{this[0]:.1f}" for this in these)])
    return found


def main(
    programs: Annotated[int, typer.Option(min=1)] = 20,
    jps: Annotated[float, typer.Option(help="programs a second", min=0.001)] = 1.0,
    seeds: Annotated[str, typer.Option(help="3..5, or 1,2")] = "3..5",
    workers: Annotated[int, typer.Option(min=1)] = 2,
) -> None:
    """Print the table."""
    base = Live(OURS, programs, jps, 0, dram_gb=SMALL)
    try:
        refuse_settings()
        typer.echo(markdown(lines(base, seeds_of(seeds), workers)))
    except SweepError as error:
        raise SystemExit(f"first_waits: {error}") from error


if __name__ == "__main__":
    typer.run(main)
