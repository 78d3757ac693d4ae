"""Checks a GPU in half an hour: does it run, are tokens right, what does it cost and gain?

    python -m experiments.gpu_check --out gpu-check

Each stage has its own process and a time limit. Its results are in OUT when it ends, and the page
(OUT/gpu-check.md) is written again each time, so an interrupted run keeps its results:

    versions   what is installed, and on which device
    exact      token for token against plain PyTorch, float32, LMCache's server: GPU, DRAM, disk,
               recompute, a prompt that is cached whole
    native     the same over vLLM's own offloading (--kv-offloading-size); its worker needs a GPU
    rounding   bfloat16, as vLLM serves it: no further off than without any cache
    profile    profiles/measure.py: prefill, steps by chunk and batch, copies, disk
    agents     fcfs, continuum and the paper's policy: pairs where memory is ample, then more live sessions
               of Claude Code's programs than the KV cache holds, without LMCache and with it
    simulated  the same sessions in the simulator, from that profile
    cost       our scheduler's own time, beside the step's

With --only, stages that ran before in OUT stay on the page. With --queue the first stage runs that has
not passed there, for a card that is at hand for a quarter of an hour now and then. It also runs on a
machine without a GPU, with the small model, to test itself; its times mean nothing there.
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

from experiments.gpu.place import PLACES, Place, device_here, facts, model_for, settings
from experiments.tiny_model import make_model

ROOT = Path(__file__).parents[1]
WORK = ROOT / ".work"
LEAST_S = 10.0  # a stage that has less is not begun
STOPPING_S = 10.0  # of `agents`: after the last replay
PROFILE_SHARE = 0.3  # of the profile's limit: the rest is the engine's start


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


def versions(job: Job) -> dict[str, Any]:
    return facts(job.place.device) | {"failed": ""}


def tokens(job: Job, dtype: str, tier: str) -> dict[str, Any]:
    """How far tokens are from plain PyTorch's (experiments/exactness.py)."""
    from experiments.exactness import NATIVE, checked

    if tier == NATIVE and not job.place.on_gpu:
        return {"failed": "", "skipped": "vLLM refuses its own offloading on a CPU"}
    return checked(job.place.device, dtype, job.out, tier)


def profile(job: Job) -> dict[str, Any]:
    """Runs profiles.measure by its command line; the result is its file."""
    path = job.out / "profile.yaml"
    command = [sys.executable, "-m", "profiles.measure", "--model", str(model_for(job.place, WORK))]
    command += ["--out", str(path), "--quick", "--force", "--budget-s", f"{PROFILE_SHARE * job.limit_s:.0f}"]
    command += ["--dtype", job.place.dtype]
    command += ["--load-format", "dummy"] if job.place.dummy_weights else []
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    print(ran.stdout)
    lines = ran.stdout.strip().splitlines()
    failed = "" if ran.returncode == 0 else f"profiles.measure ended with {ran.returncode}; see profile.log"
    return {"last_lines": lines[-4:], "failed": failed}


def agents(job: Job) -> dict[str, Any]:
    from experiments.gpu.agents import measured

    until_s = time.monotonic() + job.limit_s - STOPPING_S
    model = model_for(job.place, WORK)
    return measured(job.place, model, job.profile, job.out, until_s, lambda found: save(job, "agents", found))


def simulated(job: Job) -> dict[str, Any]:
    from experiments.gpu.agents import simulated

    live = json.loads((job.out / "agents.json").read_text())["rows"]
    return {"rows": simulated(live, job.place, job.profile, job.out), "failed": ""}


def cost(job: Job) -> dict[str, Any]:  # noqa: ARG001 (every stage is given a job)
    from experiments.overhead import measured

    return {"table": measured(((1, 0), (16, 0), (256, 0)), rounds=30, repeats=3), "failed": ""}


def save(job: Job, stage: str, found: Mapping[str, Any]) -> None:
    (job.out / f"{stage}.json").write_text(json.dumps(found, indent=1) + "\n")


STAGES = {
    "versions": Stage(versions, 30),
    "exact": Stage(partial(tokens, dtype="float32", tier="lmcache"), 240, timed=False),
    "native": Stage(partial(tokens, dtype="float32", tier="native"), 240, timed=False),
    "rounding": Stage(partial(tokens, dtype="bfloat16", tier="lmcache"), 240, timed=False),
    "profile": Stage(profile, 300),
    "agents": Stage(agents, 840),
    "simulated": Stage(simulated, 400),
    "cost": Stage(cost, 40),
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


def run_in_time(name: str, place: Place, out: Path, end_s: float) -> Mapping[str, Any]:
    """The stage's results, if enough time is left until `end_s` (on time.monotonic)."""
    left_s = end_s - time.monotonic()
    mine_s = min(left_s, STAGES[name].limit_s) if place.on_gpu else left_s
    if mine_s < LEAST_S:
        return {"failed": "no time was left", "seconds": 0.0}
    return run_stage(name, out, mine_s)


def run_stage(name: str, out: Path, limit_s: float) -> dict[str, Any]:
    """Run the stage in its own process, which its limit ends with all its children. Returns its results."""
    log, found = out / f"{name}.log", out / f"{name}.json"
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
    found.write_text(json.dumps(row, indent=1) + "\n")
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
    queue: Annotated[
        bool, typer.Option("--queue", help="the first stage that has not passed in OUT")
    ] = False,
    minutes: Annotated[float, typer.Option(min=0.5, help="for all stages")] = 30.0,
    stage_limit_s: Annotated[float, typer.Option(hidden=True)] = 0.0,
) -> None:
    """Check this machine."""
    place, chosen = PLACES[device_here()], only.split(",") if only else list(STAGES)
    if unknown := [name for name in chosen if name not in STAGES]:
        raise typer.BadParameter(f"{unknown[0]!r} is not known; known: {', '.join(STAGES)}")
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if queue and not (chosen := unfinished(out)[:1]):
        typer.echo(f"every stage has passed in {out}")
        raise typer.Exit
    if stage_limit_s:  # this is a stage's own process
        job = Job(place, out, stage_limit_s)
        save(job, chosen[0], STAGES[chosen[0]].run(job))
        sys.stdout.flush()
        os._exit(0)  # no finalizers: an engine's may hang
    raise typer.Exit(checked(place, chosen, 60 * minutes, out))


def checked(place: Place, chosen: list[str], limit_s: float, out: Path) -> bool:
    """Run the stages and write the page after each; whether anything failed."""
    from experiments.gpu.page import write

    console, end_s = Console(), time.monotonic() + limit_s
    make_model(WORK / "tiny-model")  # which stages that run side by side would each write
    rows: dict[str, Mapping[str, Any]] = earlier(out, chosen)
    for group in groups(place, chosen):
        with ThreadPoolExecutor(len(group)) as pool:
            rows |= zip(
                group, pool.map(lambda name: run_in_time(name, place, out, end_s), group), strict=True
            )
        for name in group:
            row = rows[name]
            console.print(f"{name}: {row['failed'] or 'ok'} ({row['seconds']:.0f} s)", markup=False)
        write({name: rows[name] for name in STAGES if name in rows}, settings(place), out)
    console.print(f"{out / 'gpu-check.md'}", markup=False)
    return any(rows[name]["failed"] for name in chosen)


if __name__ == "__main__":
    app()
