"""Checks a GPU in half an hour: does it run, are tokens right, what does it cost and gain?

    python -m experiments.gpu_check --out gpu-check

Each stage has its own process and a time limit. Its results are in OUT when it ends, and the page
(OUT/gpu-check.md) is written again each time, so an interrupted run keeps its results:

    versions   what is installed, and on which device
    exact      token for token against plain PyTorch, float32, LMCache's server: GPU, DRAM, disk,
               recompute, a prompt that is cached whole
    native     the same over vLLM's own offloading (--kv-offloading-size); its worker needs a GPU
    gemma3, gpt-oss, qwen3-next   the same as exact, for small models of those kinds: windows or states
               beside full attention; the last in bfloat16, as its kernels need, and on a GPU alone
    rounding   bfloat16, as vLLM serves it: no further off than without any cache
    profile    profiles/measure.py: prefill, steps by chunk and batch, copies, disk
    level      pairs of fcfs and continuum where memory is ample
    agents     fcfs, continuum and the paper's policy, with more live sessions of Claude Code's programs than
               the KV cache holds: without a tier, with LMCache, on a GPU also with vLLM's own offloading
    simulated  the same sessions in the simulator, from that profile
    cost       our scheduler's own time, beside the step's
    grid       the profile's whole grid, for profiles/; with --queue or --only
    agentx     AgentX by its own harness (experiments/agentx.py), which pip fetches; as grid, --minutes 240

With --only, stages that ran before in OUT stay on the page. --queue goes on with those that have not passed
there, `level` and `agents` with the rows that they lack: for a card that is at hand only now and then.
It also runs on a machine without a GPU, with the small model, to test itself; its times mean nothing there.
Exit status 1 if a stage failed or did not finish.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console

from continuum_lmcache.vllm_plugin.files import write_whole
from experiments.gpu.place import PLACES, Place, device_here, facts, model_for, settings
from experiments.server import unwind_on_sigterm
from experiments.tiny_model import MODELS, make_model

ROOT = Path(__file__).parents[1]
WORK = ROOT / ".work"
LEAST_S = 10.0  # a stage that has less is not begun
STOPPING_S = 20.0  # of a stage with servers: after the last replay
HYBRIDS = {"gemma3": "float32", "gpt-oss": "float32", "qwen3-next": "bfloat16"}
HYBRID_S = 300.0  # kernels of layers that `exact` does not have are compiled too
STATES = "tiny-qwen3-next"


@dataclass(frozen=True, slots=True)
class Job:
    """A stage's input."""

    place: Place
    out: Path
    limit_s: float  # from its process's start

    @property
    def profile(self) -> Path:
        """The measured one if there is one."""
        found = self.out / "profile.yaml"
        return found if found.exists() else ROOT / "profiles" / self.place.profile


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of the check. `limit_s` is for a GPU; a CPU gets all of the remaining time."""

    run: Callable[[Job], dict[str, Any]]
    limit_s: float
    timed: bool = True  # alone on the machine; on a GPU the others run side by side
    on_demand: bool = False  # not in a run of all stages


def versions(job: Job) -> dict[str, Any]:
    return facts(job.place.device) | {"failed": ""}


def tokens(job: Job, dtype: str, tier: str, model: str = "tiny-model") -> dict[str, Any]:
    """How far tokens are from plain PyTorch's (experiments/exactness.py)."""
    from experiments.exactness import NATIVE, checked

    needs_gpu = {
        NATIVE: "vLLM refuses its own offloading on a CPU",
        STATES: "LMCache refuses states on a CPU",
    }
    if not job.place.on_gpu and (why := needs_gpu.get(tier) or needs_gpu.get(model)):
        return {"failed": "", "skipped": why}
    return checked(job.place.device, dtype, job.out, tier, model)


def profile(job: Job, name: str, share: float, *options: str) -> dict[str, Any]:
    """Runs profiles.measure for a `share` of the limit, beside the engine's start; the result is its file."""
    command = [sys.executable, "-m", "profiles.measure", "--model", str(model_for(job.place, WORK))]
    command += ["--out", str(job.out / name), "--force", "--budget-s", f"{share * job.limit_s:.0f}"]
    command += ["--dtype", job.place.dtype, *options]
    command += ["--load-format", "dummy"] if job.place.dummy_weights else []
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    print(ran.stdout)
    lines = ran.stdout.strip().splitlines()
    failed = "" if ran.returncode == 0 else f"profiles.measure ended with {ran.returncode}; see its log"
    return {"last_lines": lines[-4:], "failed": failed}


def live(job: Job, name: str) -> dict[str, Any]:
    """Measure servers; what this stage's file has already is kept."""
    from experiments import agentx
    from experiments.gpu import agents

    until_s = time.monotonic() + job.limit_s - STOPPING_S
    bench = agents.Bench(job.place, model_for(job.place, WORK), job.profile, job.out, until_s)
    run = {"level": agents.level, "agents": agents.measured, "agentx": agentx.stage}[name]
    left = job.out / f"{name}.json"  # with --queue alone
    return run(bench, partial(save, job.out, name), json.loads(left.read_text()) if left.exists() else {})


def simulated(job: Job) -> dict[str, Any]:
    from experiments.gpu.agents import simulated

    live = json.loads((job.out / "agents.json").read_text())
    rows = simulated(live["rows"], job.place, job.profile, job.out)
    return {"rows": rows, "failed": live["failed"] and "agents has not passed"}  # more rows will come


def cost(job: Job) -> dict[str, Any]:  # noqa: ARG001 (every stage is given a job)
    from experiments.overhead import in_a_process, table

    return {"table": table([{name: in_a_process(name) for name in ("stock", "named")}]), "failed": ""}


def save(out: Path, stage: str, found: Mapping[str, Any]) -> None:
    """Whole: a stage may be killed at any moment, and the next run goes on from this file."""
    write_whole(out / f"{stage}.json", [json.dumps(found, indent=1), "\n"])


STAGES = {
    "versions": Stage(versions, 30),
    "exact": Stage(partial(tokens, dtype="float32", tier="lmcache"), 240, timed=False),
    "native": Stage(partial(tokens, dtype="float32", tier="native"), 240, timed=False),
    **{
        name: Stage(partial(tokens, dtype=dtype, tier="lmcache", model=f"tiny-{name}"), HYBRID_S, timed=False)
        for name, dtype in HYBRIDS.items()
    },
    "rounding": Stage(partial(tokens, dtype="bfloat16", tier="lmcache"), 240, timed=False),
    "profile": Stage(lambda job: profile(job, "profile.yaml", 0.3, "--quick"), 300),
    "level": Stage(partial(live, name="level"), 300),
    "agents": Stage(partial(live, name="agents"), 660),
    "simulated": Stage(simulated, 400),
    "cost": Stage(cost, 120),
    "grid": Stage(lambda job: profile(job, "grid.yaml", 0.6), 560, on_demand=True),
    "agentx": Stage(partial(live, name="agentx"), 14_400, on_demand=True),
}


def earlier(out: Path, chosen: list[str]) -> dict[str, Mapping[str, Any]]:
    """The results of earlier runs' stages in OUT, for the page; without those that run again."""
    files = {name: out / f"{name}.json" for name in STAGES if name not in chosen}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def unfinished(out: Path) -> list[str]:
    """The stages that have not passed in OUT, in order."""
    rows = earlier(out, [])
    return [name for name in STAGES if name not in rows or rows[name]["failed"]]


def groups(place: Place, chosen: list[str]) -> list[list[str]]:
    """The stages in order; those in one group run at the same time."""
    at_once = groupby(chosen, lambda name: place.on_gpu and not STAGES[name].timed)
    return [
        part for together, names in at_once for part in ([[*names]] if together else [[n] for n in names])
    ]


def run_in_time(name: str, place: Place, out: Path, end_s: float, goes_on: bool) -> Mapping[str, Any]:
    """The stage's results, if enough time is left until `end_s` (on time.monotonic)."""
    left_s = end_s - time.monotonic()
    mine_s = min(left_s, STAGES[name].limit_s) if place.on_gpu else left_s
    if mine_s < LEAST_S:
        return {"failed": "no time was left", "seconds": 0.0}
    return run_stage(name, out, mine_s, goes_on)


def run_stage(name: str, out: Path, limit_s: float, goes_on: bool = False) -> dict[str, Any]:
    """Run the stage in its own process, which its limit ends with all its children. Returns its results:
    anew, or `goes_on` from the earlier ones."""
    log, found = out / f"{name}.log", out / f"{name}.json"
    if not goes_on:
        found.unlink(missing_ok=True)
    why = ""
    command = [sys.executable, "-m", "experiments.gpu_check", "--out", str(out), "--only", name]
    begun_s = time.monotonic()
    with log.open("w") as lines:
        process = subprocess.Popen(
            [*command, "--stage-limit-s", str(limit_s)],
            stdout=lines,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=ROOT,
        )
        try:
            if process.wait(limit_s):
                why = f"its process ended with {process.returncode}"
        except subprocess.TimeoutExpired:
            why = f"not done after {limit_s:.0f} s"
        finally:
            end(process)
    row: dict[str, Any] = json.loads(found.read_text()) if found.exists() else {}
    if why or not row:
        errors = [line for line in log.read_text(errors="replace").splitlines() if "Error" in line]
        row["failed"] = f"{why}; {errors[-1][:300] if errors else f'see {log.name}'}"
    row["seconds"] = round(time.monotonic() - begun_s, 1)
    save(out, name, row)
    return row


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a stage and all that it started: its servers are in sessions of their own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait()


app = typer.Typer(add_completion=False)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="results, logs and the page")] = Path("gpu-check"),
    only: Annotated[str, typer.Option(help=f"of {', '.join(STAGES)}; several with commas")] = "",
    queue: Annotated[bool, typer.Option("--queue", help="go on with what has not passed in OUT")] = False,
    minutes: Annotated[float, typer.Option(min=0.5, help="for all stages")] = 30.0,
    stage_limit_s: Annotated[float, typer.Option(hidden=True)] = 0.0,
) -> None:
    """Check this machine."""
    unwind_on_sigterm()  # with all that its stages started
    place = PLACES[device_here()]
    chosen = only.split(",") if only else [name for name, stage in STAGES.items() if not stage.on_demand]
    if unknown := [name for name in chosen if name not in STAGES]:
        raise typer.BadParameter(f"{unknown[0]!r} is not known; known: {', '.join(STAGES)}")
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if queue and not (chosen := unfinished(out)):
        typer.echo(f"every stage has passed in {out}")
        raise typer.Exit
    if stage_limit_s:  # this is a stage's own process
        job = Job(place, out, stage_limit_s)
        save(out, chosen[0], STAGES[chosen[0]].run(job))
        sys.stdout.flush()
        os._exit(0)  # no finalizers: an engine's may hang
    raise typer.Exit(checked(place, chosen, 60 * minutes, out, queue))


def checked(place: Place, chosen: list[str], limit_s: float, out: Path, goes_on: bool = False) -> bool:
    """Run the stages and write the page after each; whether anything failed."""
    from experiments.gpu.page import write

    console, end_s = Console(), time.monotonic() + limit_s
    for name, config in MODELS.items():  # which stages that run side by side would each write
        make_model(WORK / name, config=config)
    rows: dict[str, Mapping[str, Any]] = earlier(out, chosen)
    for group in groups(place, chosen):
        with ThreadPoolExecutor(len(group)) as pool:
            found = pool.map(lambda name: run_in_time(name, place, out, end_s, goes_on), group)
            rows |= zip(group, found, strict=True)
        for name in group:
            row = rows[name]
            console.print(f"{name}: {row['failed'] or 'ok'} ({row['seconds']:.0f} s)", markup=False)
        write({name: rows[name] for name in STAGES if name in rows}, settings(place), out)
    console.print(f"{out / 'gpu-check.md'}", markup=False)
    return any(rows[name]["failed"] for name in chosen)


if __name__ == "__main__":
    app()
