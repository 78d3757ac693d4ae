"""Serve the small model twice, replay the same agent programs against both, compare.

    python -m experiments.demo                  # programs drawn from the paper's Table 1
    TRACE=trace.jsonl python -m experiments.demo

One server after the other, with the same KV budget and the same LMCache tiers: stock `fcfs`, then
`continuum`. The scenario keeps the proportions of the paper's offload experiment (Continuum,
arXiv 2511.02230, full version, Fig. 9: SWE-Bench on one A100), not its length:

- GPU KV: about 7 mean final contexts, as 480k tokens of KV are to 70k a program;
- tool time: about a third of the work, as 8 s are to 22.7 s of GPU work, hence TIME_SCALE;
- DRAM as large as the GPU's KV and disk twice that, so that all programs together need every tier;
- arrivals: about twice what a core can do (one program takes it 2 to 3 s), so that within a minute
  a backlog forms as it does within an hour at the paper's rates. Far below that, nothing is evicted
  and every policy is equal: a faster machine needs a higher --jps, and the demo says so.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from continuum_lmcache.errors import TraceError
from experiments.client import ServerUnusable
from experiments.figures import draw
from experiments.replay import Job, replay
from experiments.selection import Selection
from experiments.server import ServerError, serve
from experiments.tables import Summary, caption, comparison, load, markdown, plain, write_csv
from experiments.tiny_model import make_model

ROOT = Path(__file__).parents[1]
POLICIES = ("fcfs", "continuum")
WINDOW_TOKENS = 4096
BLOCK_TOKENS = 128  # vLLM's default on a CPU
GPU_BLOCKS = 120
CHUNK_TOKENS = 128  # LMCache's; the default of 256 is coarse beside contexts of 2,000 tokens
KV_BYTES_PER_TOKEN = 8192  # of the small model in bfloat16
TIME_SCALE = 0.125  # 2 to 3 s of work a program where the paper's takes 22.7 s
PROGRAMS = 20
JPS = 1.0
PRESSED_SHARE = 0.25  # of what stock reuses comes from the tiers; below it the GPU held nearly all


def tiers(disk: Path) -> dict[str, Any]:
    """LMCache's settings for the scenario, on top of lmcache.json."""
    gpu_gib = GPU_BLOCKS * BLOCK_TOKENS * KV_BYTES_PER_TOKEN / 2**30
    return {
        "lmcache.chunk_size": CHUNK_TOKENS,
        "lmcache.local_cpu": True,
        "lmcache.max_local_cpu_size": gpu_gib,
        "lmcache.local_disk": f"file://{disk}/",
        "lmcache.max_local_disk_size": 2 * gpu_gib,
        "continuum.profile": str(ROOT / "profiles" / "cpu-tiny.yaml"),  # stock fcfs does not read it
    }


def connector(disk: Path, path: Path) -> Path:
    """The repository's lmcache.json with the scenario's tiers, written to `path`."""
    config = json.loads((ROOT / "lmcache.json").read_text())
    config["kv_connector_extra_config"] = config.get("kv_connector_extra_config", {}) | tiers(disk)
    path.write_text(json.dumps(config, indent=1))
    return path


def measure(policy: str, selection: Selection, model: Path, out: Path) -> Path:
    """Serve with `policy`, replay, stop; the summary's path. Raises ServerError, ServerUnusable."""
    with tempfile.TemporaryDirectory(prefix="continuum-disk-") as disk:
        config = connector(Path(disk), out / f"{policy}-lmcache.json")
        args = ["--scheduling-policy", policy, "--kv-transfer-config", str(config)]
        args += ["--max-model-len", str(WINDOW_TOKENS), "--num-gpu-blocks-override", str(GPU_BLOCKS)]
        log = out / f"{policy}-seed{selection.seed}-server.log"
        with serve(model, args, log=log) as url:
            job = Job(f"{url}/v1", policy, selection, out)
            replay(job)
    return job.path.with_suffix(".json")


def both(selection: Selection, repeats: int, out: Path, console: Console) -> list[Path]:
    """The summaries of every policy for seeds 1 to `repeats`."""
    console.print("making the small model (once)")
    model = make_model(ROOT / ".work" / "tiny-model")
    paths = []
    for seed in range(1, repeats + 1):
        # every second seed the other way round, so that a machine that drifts favours nobody
        for policy in POLICIES if seed % 2 else reversed(POLICIES):
            console.print(f"seed {seed}: serving with {policy} + LMCache, then replaying")
            paths.append(measure(policy, replace(selection, seed=seed), model, out))
    return paths


def machine() -> str:
    """This machine and the engines' versions, in one line."""
    cpu = memory_gib = "unknown"
    if platform.system() == "Linux":
        info = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.partition(": ")[2] for line in info if line.startswith("model name")), cpu)
        memory_gib = f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f}"
    engines = ", ".join(f"{name} {version(name)}" for name in ("vllm", "lmcache", "torch"))
    cores = os.cpu_count()
    return f"{cpu}, {cores} cores, {memory_gib} GiB; Python {platform.python_version()}, {engines}"


def ease(summaries: list[Summary]) -> str:
    """What to say where this machine was too fast for the scenario; "" where it was not."""
    sources = [summary["tokens_by_source"] for summary in summaries]
    share = statistics.median(
        1.0 - found.get("gpu", 0) / max(1, sum(found.values()) - found.get("computed", 0))
        for found in sources
    )
    if share >= PRESSED_SHARE:
        return ""
    label = summaries[0]["label"]
    return (
        f"Little to gain here: of the prompt tokens that {label} reused, {1 - share:.0%} were still on the "
        "GPU. This machine serves the programs as they come; let them come faster, with --jps"
    )


def report(paths: list[Path], out: Path, console: Console) -> None:
    """The table on the terminal; table, CSV and figure into `out`."""
    runs = load(sorted(paths, key=lambda path: POLICIES.index(path.name.partition("-seed")[0])))
    rows = comparison(runs)
    console.print(plain(rows, caption(runs)))
    note = f"{caption(runs)}\n\n{machine()}\n\n{markdown(rows)}\n\n![figure](comparison.png)\n"
    (out / "comparison.md").write_text(note)
    write_csv(runs, out / "comparison.csv")
    draw(runs, out / "comparison")
    if found := ease(next(iter(runs.values()))):
        console.print(found)
    console.print(f"{machine()}\nwrote comparison.md, .csv, .png and .svg into {out}/")


def main(
    trace: Annotated[Path | None, typer.Option(envvar="TRACE", help="Replay a trace file instead.")] = None,
    source: Annotated[str, typer.Option(help="Only programs of the trace from such sources.")] = "",
    programs: Annotated[int, typer.Option(min=1, help="How many.")] = PROGRAMS,
    jps: Annotated[float, typer.Option(min=1e-6, help="Poisson arrivals a second.")] = JPS,
    time_scale: Annotated[float, typer.Option(min=0, help="Of tool gaps.")] = TIME_SCALE,
    repeats: Annotated[int, typer.Option(min=1, help="Seeds 1 to N; medians are shown.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("demo-results"),
) -> None:
    """Compare stock fcfs with continuum, both with LMCache, on the small model."""
    console = Console()
    out.mkdir(parents=True, exist_ok=True)
    selection = Selection(
        1, trace, "swe", programs, jps, source, max_context_tokens=WINDOW_TOKENS, time_scale=time_scale
    )
    try:
        selection.programs(lambda _: None)  # a bad trace is known before a server starts
        paths = both(selection, repeats, out, console)
    except (ServerError, ServerUnusable, TraceError) as error:
        raise SystemExit(f"demo: {error}") from error
    report(paths, out, console)
    raise SystemExit(any(summary["errors"] for runs in load(paths).values() for summary in runs))


if __name__ == "__main__":
    typer.run(main)
