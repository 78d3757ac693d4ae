"""Measure this machine with one model, and write what its KV costs as a profile.

    python -m profiles.measure --model DIR --out profiles/NAME.yaml [--quick]

Prefill and steps through a real vLLM engine, copies along LMCache's path, the disk with O_DIRECT.
Under ten minutes; --quick takes about one, for a first look. What the file holds: profiles/README.md.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python PATH` as well as -m

from continuum_lmcache.errors import ProfileError
from continuum_lmcache.reload.cost_model import CostModel
from profiles.copy_timing import CudaMover, mover_for, time_copies, while_computing
from profiles.disk_timing import answered_by, chunk_files, file_system, time_disk
from profiles.engine_timing import Engine
from profiles.grids import CPU, GPU, GPU_QUICK, QUICK, Grid
from profiles.machine import load_average, machine, today
from profiles.report import Measured, profile_of
from profiles.timing import Budget, Sample, Timer, Which, in_turns

CHUNK_TOKENS = 256  # LMCache's default
Tick = Callable[[], None]


def measure(
    engine: Engine, disk_dir: Path, grid: Grid, device: str, timer: Timer
) -> tuple[Measured, dict[str, Any]]:
    """All timings of this machine, with their conditions."""
    budget = Budget(grid.budget_s, grid.repetitions)
    total = (grid.repetitions + 1) * (len(grid.prefills) + step_count(grid) + 4 * len(grid.load_chunks))
    with tqdm(total=total, unit="timing", desc="measuring") as bar:
        fits = [point for point in grid.prefills if sum(point) < engine.kv_tokens]
        prefill = in_turns(fits, lambda point: engine.prefill(*point), budget.share(0.6), bar.update)
        steps = time_steps(engine, grid, budget.share(0.6), bar.update)
        mover = mover_for(engine.kv_shape, CHUNK_TOKENS, device)
        copies = time_copies(mover, list(grid.load_chunks), budget.share(0.5), timer, bar.update)
        chunk_bytes = CHUNK_TOKENS * engine.kv_shape.bytes_per_token
        with chunk_files(disk_dir, chunk_bytes) as files:
            disk = time_disk(files, list(grid.load_chunks), budget, timer, bar.update)
            facts = {
                "disk": {
                    "file_system": file_system(files.folder),
                    "o_direct": files.direct,
                    "answered_by": answered_by(files, 32),
                }
            }
    if isinstance(mover, CudaMover):
        facts["load_while_computing"] = while_computing(mover, 16, timer)
    return Measured(engine.kv_shape, CHUNK_TOKENS, prefill, steps, copies, disk, engine.kv_tokens), facts


def time_steps(
    engine: Engine, grid: Grid, budget: Budget, tick: Tick
) -> dict[tuple[int, int, int], list[Sample]]:
    """Seconds of a step by (chunk, context, decoding sequences), where the KV cache holds all that."""
    taken: dict[tuple[int, int, int], list[Sample]] = {}
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


def step_count(grid: Grid) -> int:
    return len(grid.step_chunks) * len(grid.step_contexts) * len(grid.step_batches)


def device_here() -> str:
    """Where vLLM would run: "cuda" or "cpu". Raises ProfileError for anything else."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return "cpu"
    if current_platform.is_cuda():
        return "cuda"
    raise ProfileError(f"vLLM runs on {current_platform.device_name} here; CPUs and CUDA are measured")


def main(
    model: Annotated[Path, typer.Option(help="The model's directory.", exists=True)],
    out: Annotated[Path, typer.Option(help="The YAML file to write.")],
    quick: Annotated[bool, typer.Option(help="A small grid, a minute: a first look.")] = False,
    force: Annotated[bool, typer.Option(help="Write a fit with R2 under 0.98 as well.")] = False,
    clock: Annotated[Which, typer.Option(help="cpu: for a CPU machine that others use too.")] = Which.WALL,
    disk_dir: Annotated[
        Path | None, typer.Option(help="A folder on LMCache's disk.", show_default="a temporary one")
    ] = None,
    budget_s: Annotated[float | None, typer.Option(help="Seconds after the engine's start.", min=1)] = None,
    load_format: Annotated[str, typer.Option(help="As vLLM's; dummy: a shape without weights.")] = "auto",
    dtype: Annotated[str, typer.Option(help="As the server's that will read the profile.")] = "bfloat16",
) -> None:
    """Measure this machine with one model and write its profile."""
    before = load_average()
    try:
        device = device_here()
        if device == "cuda" and clock is Which.CPU:
            raise ProfileError("--clock cpu does not see what a GPU takes; leave it out")
        full, small = (CPU, QUICK) if device == "cpu" else (GPU, GPU_QUICK)
        grid = small if quick else full
        grid = replace(grid, budget_s=budget_s or grid.budget_s)
        folder = disk_dir or Path(tempfile.gettempdir())
        timer, batch = Timer(), max(grid.step_batches)
        engine = Engine(model, grid.longest_tokens, grid.largest_chunk, batch, timer, load_format, dtype)
        measured, facts = measure(engine, folder, grid, device, timer)
        profile = profile_of(measured, clock, force)
    except ProfileError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    profile["provenance"] |= {
        "date": today(),
        "command": command(model, out, clock, dtype, quick, force, budget_s),
        "model": model.name,
        "load_format": load_format,
        "dtype": dtype,
        **machine(device),
        "load_average": {"before": before, "after": load_average()},
        "repetitions": grid.repetitions,
        **facts,
    }
    CostModel.from_mapping(profile, str(out))  # the written file can be read
    out.write_text(yaml.safe_dump(profile, sort_keys=False, width=110))
    typer.echo(verdict(profile))


def command(
    model: Path, out: Path, clock: Which, dtype: str, quick: bool, force: bool, budget_s: float | None
) -> str:
    """The command, without this machine's folders."""
    given = {"quick": quick, "force": force, f"budget-s {budget_s or 0:g}": budget_s}
    options = f" --clock {clock.value} --dtype {dtype}"
    options += "".join(f" --{name}" for name, value in given.items() if value)
    return f"python -m profiles.measure --model {model.name} --out {out.name}{options}"


def verdict(profile: dict[str, Any]) -> str:
    """The most important results."""
    origin = profile["provenance"]
    lines = [f"prefill: {1 / profile['prefill']['per_token_s']:.0f} tokens/s at no context"]
    lines[0] += f", R2 {origin['prefill_fit']['r2']:.3f}"
    for name in ("dram", "ssd"):
        lines.append(
            f"{name}: {profile[name]['bytes_per_s'] / 1e9:.2f} GB/s, {profile[name]['samples']} samples"
        )
    if origin["disk"]["answered_by"] == "page cache":
        lines.append("the page cache answered the disk's reads: the rate of `ssd` is that of memory")
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
