"""What does the longest wait for a first token cost? Settings that trade it for job time, beside vLLM's fcfs.

    python -m experiments.first_waits --programs 40 --seeds 3..5

The live runs under memory pressure (`offload_sweep pressure --engine live`) in the lab: the same programs,
tiers and proportions, on the machine as its profile was measured, without what a server adds. All loads and
stores hold the step up, as LMCache in-process does. `endless-gpu` is program order on a KV cache that never
fills: what memory alone could give; an order may still beat it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Annotated, Any

import typer
import yaml

from experiments.offload_sweep import seeds_of
from experiments.replay import SHARED_PREFIX_TOKENS
from experiments.sim import serving
from experiments.sim.engine import simulate
from experiments.sim.result import Result
from experiments.sim.step_time import Machine
from experiments.sim.workloads import with_tool_time
from experiments.sweep.cases import ENDLESS, STOCK, Live
from experiments.sweep.live import ROOT, gib, machine_of, selection_of
from experiments.sweep.live_plans import KV_GB, SMALL
from experiments.tables import markdown, spread

STEP_TOKENS = 2048  # vLLM's default on such a machine
DISKS_GB = {"DRAM alone": 0.0, "and a disk": 2 * KV_GB}
OURS = "continuum"
RIVALS = (STOCK, "continuum-published", ENDLESS)
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    OURS: {},
    "... first_prompt_order=false": {"first_prompt_order": False},
    "... max_wait_s=10": {"max_wait_s": 10.0},
    "... max_wait_s=3": {"max_wait_s": 3.0},
    "... admission=false": {"admission": False},
}


def twin(case: Live, settings: Mapping[str, Any]) -> Result:
    """The case in the lab. Raises SweepError for unknown names."""
    machine, chosen = machine_of(case), selection_of(case)
    profile = yaml.safe_load((ROOT / "profiles" / machine.profile).read_text())
    programs = with_tool_time(chosen.programs(lambda _: None), chosen.time_scale)
    kv_tokens = machine.gpu_blocks * machine.block_tokens
    if case.contender == ENDLESS:
        kv_tokens = sum(program.context_tokens + machine.block_tokens for program in programs)
    tiers = {"dram_gb": gib(case.dram_gb), "ssd_gb": gib(case.ssd_gb), "async": False}
    setup = serving.Setup(
        policy={STOCK: serving.STOCK, ENDLESS: "program-fcfs"}.get(case.contender, case.contender),
        tiers={**tiers, "chunk_tokens": machine.chunk_tokens, "save_decode_cache": False},
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
    result = twin(case, settings)
    return result.mean_job_s, max(turn.ttft_s for turn in result.turns)


def lines(base: Live, seeds: Sequence[int], workers: int) -> Iterator[list[str]]:
    """A line of the table per tiers and setting: how many times fcfs's, seed by seed."""
    yield ["tiers", "", "mean job time, fcfs / this", "longest TTFT, this / fcfs", "mean job time, s"]
    with ProcessPoolExecutor(workers) as pool:
        for (tiers, disk_gb), (name, settings) in product(
            DISKS_GB.items(), [*((name, {}) for name in RIVALS), *SETTINGS.items()]
        ):
            cases = [replace(base, seed=seed, ssd_gb=disk_gb) for seed in seeds]
            contender = OURS if name in SETTINGS else name
            ours = [replace(case, contender=contender) for case in cases]
            found = list(pool.map(partial(figures, settings=settings), ours))
            if name == STOCK:
                stock = found
            jobs = [mine[0] for mine in found]
            faster = [theirs[0] / mine for theirs, mine in zip(stock, jobs, strict=True)]
            later = [mine[1] / theirs[1] for theirs, mine in zip(stock, found, strict=True)]
            yield [tiers, name, spread(faster), spread(later), " ".join(f"{s:.1f}" for s in jobs)]


def main(
    programs: Annotated[int, typer.Option(min=1)] = 20,
    jps: Annotated[float, typer.Option(help="programs a second", min=0.001)] = 1.0,
    seeds: Annotated[str, typer.Option(help="3..5, or 1,2")] = "3..5",
    workers: Annotated[int, typer.Option(min=1)] = 2,
) -> None:
    """Print the table."""
    base = Live(OURS, programs, jps, 0, dram_gb=SMALL)
    typer.echo(markdown(list(lines(base, seeds_of(seeds), workers))))


if __name__ == "__main__":
    typer.run(main)
