"""Says whether continuum would help, checks a deployment, watches a server, and reports on a recorded run.

    continuum-lmcache estimate http://127.0.0.1:8000
    continuum-lmcache init --dram-gib 100 --disk /nvme/kv
    continuum-lmcache doctor MODEL --gpu h200 --lmcache lmcache.json
    continuum-lmcache status http://127.0.0.1:8000
    continuum-lmcache top http://127.0.0.1:8000
    continuum-lmcache report run/ other-run/

Exit status: 0 no problem, 1 a problem was found, 2 bad input, in one line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console
from typer.exceptions import TyperException

from continuum_lmcache import __version__, shipped
from continuum_lmcache.console import doctor as doctors
from continuum_lmcache.console import doctor_output
from continuum_lmcache.console import status as statuses
from continuum_lmcache.console import top as tops
from continuum_lmcache.console.health_rules import FINISHED, LEAST_TURNS, policy, would_help
from continuum_lmcache.console.metrics_page import scrape
from continuum_lmcache.errors import ConfigError, ContinuumError
from continuum_lmcache.recordings.figures import figures, summary
from continuum_lmcache.recordings.reader import load, story
from continuum_lmcache.telemetry.findings import plain

BAD_INPUT = 2
NEEDED = {  # by scripts that run beside vLLM: modules, and the extra that has them
    shipped.SIMULATION: (("vllm", "numpy"), "gpu"),
    shipped.MEASURE: (("vllm", "torch", "scipy", "tqdm"), "gpu,measure"),
}
LINE_COLUMNS = 160  # of a table that goes into a file
LOOKS = 6  # at a server, of which estimate tells how far it is
SUPPORTED = {"vllm": "0.30 to 0.33", "lmcache": "0.5.6"}
PLUGIN = "continuum"  # its name among vLLM's plugins (pyproject.toml)
app = typer.Typer(help=__doc__, pretty_exceptions_enable=False)


def show_versions(wanted: bool) -> None:
    """The versions that a bug report needs; exit status 1 if vLLM does not load the plugin."""
    if not wanted:
        return
    print(f"continuum-lmcache {__version__}")
    for name, supported in SUPPORTED.items():
        try:
            print(name, metadata.version(name), f"(supported: {supported})")
        except metadata.PackageNotFoundError:
            print(name, "is not installed here")
    if find_spec("vllm") is None:
        print("the plugin has no vLLM to load it here; doctor, estimate, status and report work without")
        raise typer.Exit(1)
    chosen = os.environ.get("VLLM_PLUGINS")  # of these names only, vLLM loads plugins
    is_found = any(plugin.name == PLUGIN for plugin in metadata.entry_points(group="vllm.general_plugins"))
    loads = is_found and (chosen is None or PLUGIN in chosen.split(","))
    why = "" if loads or chosen is None else f": VLLM_PLUGINS is {chosen!r}, without {PLUGIN!r}"
    print(f"vLLM {'loads' if loads else 'does not load'} the plugin{why}")
    raise typer.Exit(0 if loads else 1)


Json = Annotated[bool, typer.Option("--json", help="one JSON object instead of text")]
Version = Annotated[
    bool, typer.Option("--version", callback=show_versions, is_eager=True, help="of this, vLLM and LMCache")
]


@app.callback(help=__doc__)
def options(version: Version = False) -> None:
    pass


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="where lmcache.json goes")] = Path(),
    dram_gib: Annotated[float, typer.Option(min=0.1, help="DRAM for KV, of all ranks")] = 5.0,
    disk: Annotated[
        str | None, typer.Option(help="a folder for KV on a local disk", show_default="asked for, or none")
    ] = None,
    disk_gib: Annotated[float, typer.Option(min=0.1, help="its size")] = 20.0,
    operating: Annotated[
        bool, typer.Option(help="also docs/: dashboard, alerts, compose, Kubernetes, Ray")
    ] = False,
    force: Annotated[bool, typer.Option(help="replace what is there")] = False,
) -> None:
    """Write lmcache.json, the file of --kv-transfer-config, for this machine."""
    if disk is None and sys.stdin.isatty():
        disk = typer.prompt("A folder for KV on a local disk (empty: none)", default="", show_default=False)
    config = shipped.connector_config(dram_gib, disk := disk or "", disk_gib)
    written = shipped.write(folder, config, operating, force)
    for path in written:
        print(f"wrote {path}")
    if folder / shipped.LMCACHE not in written:
        print(f"kept {folder / shipped.LMCACHE} as it is")
        return
    if disk and (why := shipped.why_unwritable(Path(disk))):
        print(f"NOTE: {disk} cannot be written here ({why}); name another folder, or serve where it can be")
    below = f", and {disk_gib:g} GiB in {disk}" if disk else "; --disk FOLDER adds a disk"
    print(f"KV that the GPU has no room for: {dram_gib:g} GiB of DRAM{below}")
    print(f"vllm serve MODEL --kv-transfer-config {folder / shipped.LMCACHE} --scheduling-policy continuum")


@app.command(
    add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def measure(context: typer.Context) -> None:
    """Measure this machine with one model, for continuum.profile: --model DIR --out FILE, or --help."""
    run_script(shipped.MEASURE, context.args)


@app.command()
def doctor(
    model: Annotated[str, typer.Argument(help="config.json, a folder with one, or a name: Llama-3.1-8B")],
    profile: Annotated[Path | None, typer.Option(help="measured profile (YAML, see profiles/)")] = None,
    gpu: Annotated[str, typer.Option(help="a card: h100, a100-40gb, rtx-5090, ...")] = "",
    memory_gib: Annotated[float | None, typer.Option(min=0.1, help="of one device, without --gpu")] = None,
    kv_gib: Annotated[float | None, typer.Option(min=0, help="KV cache (VLLM_CPU_KVCACHE_SPACE)")] = None,
    weights_gib: Annotated[float | None, typer.Option(min=0, help="weights, if not MODEL's own")] = None,
    gpu_memory_utilization: Annotated[float, typer.Option(min=0.01, max=1, help="vLLM's")] = 0.92,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="ranks")] = 1,
    block_size: Annotated[int | None, typer.Option(min=1, help="tokens; vLLM's default if not given")] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="vLLM's: auto, fp8, ...")] = "auto",
    lmcache: Annotated[Path | None, typer.Option(help="the file of --kv-transfer-config")] = None,
    context: Annotated[int | None, typer.Option(min=1, help="tokens of a program at its end")] = None,
    programs: Annotated[int | None, typer.Option(min=1, help="alive at the same time")] = None,
    explain: Annotated[bool, typer.Option(help="all findings and the arithmetic")] = False,
    as_json: Json = False,
) -> None:
    """Check a deployment of MODEL before it starts: KV budget, break-even of tiers, settings, versions."""
    options = {name: value for name, value in locals().items() if name not in ("as_json", "explain")}
    found = doctors.diagnosis(doctors.DoctorQuery(**options))
    if as_json:
        print(json.dumps(found, indent=1, default=plain))
    else:
        doctor_output.show(found, Console(), explain)
    raise typer.Exit(0 if found.advisable else 1)


@app.command()
def estimate(
    url: Annotated[str, typer.Argument(help="base URL of a stock vLLM server, under its usual load")] = "",
    seconds: Annotated[float, typer.Option(min=1, help="between the two looks at /metrics")] = 60.0,
    trace: Annotated[Path | None, typer.Option(help="in place of URL: a trace of your agents' runs")] = None,
    model: Annotated[str, typer.Option(help="with --trace: as the doctor's MODEL")] = "",
    gpu: Annotated[str, typer.Option(help="with --trace: a card, h100")] = "",
    dram_gb: Annotated[float, typer.Option(min=0, help="with --trace: of LMCache, 0 for none")] = 0.0,
    as_json: Json = False,
) -> None:
    """Whether continuum would help: yes, little, no, or too early to tell, and because of what."""
    if bool(url) == (trace is not None):
        raise ConfigError("give the URL of a server, or --trace with --model and --gpu")
    if trace is not None:
        options = ["--model", model, "--gpu", gpu, "--dram-gb", str(dram_gb)]
        run_script(shipped.SIMULATION, [str(trace), *options])
    at = base_url(url)
    first = scrape(at)
    if policy(first):
        raise ConfigError(f"{at} runs continuum; ask `continuum-lmcache status {at}` what it brings")
    print(f"{at}: {seconds:g} s, in which at least {LEAST_TURNS:.0f} turns must end", file=sys.stderr)
    for look in range(1, LOOKS + 1):
        time.sleep(seconds / LOOKS)
        now = scrape(at)
        ended = now.count(FINISHED) - first.count(FINISHED)
        print(f"{look * seconds / LOOKS:g} s: {ended:.0f} turns ended", file=sys.stderr)
    answer, because = would_help(now, first)
    if ended < LEAST_TURNS <= now.count(FINISHED):
        answer, because = would_help(now)
        because = f"since its start, as too few turns ended meanwhile: {because}"
    print(json.dumps({"answer": answer, "because": because}) if as_json else f"{answer}: {because}")


def run_script(name: str, arguments: list[str]) -> None:
    """Run a shipped script in place of this command. Raises ConfigError where it lacks a package."""
    modules, extra = NEEDED[name]
    if missing := [module for module in modules if find_spec(module) is None]:
        needs = f"{', '.join(missing)} not installed here; pip install 'continuum-lmcache[{extra}]'"
        raise ConfigError(f"{needs}, or without a GPU run make install in a clone")
    raise typer.Exit(subprocess.call([sys.executable, shipped.FILES / name, *arguments]))


def base_url(url: str) -> str:
    """A server's address, with or without its scheme and "/v1"."""
    return ("" if "://" in url else "http://") + url.rstrip("/").removesuffix("/v1")


@app.command()
def status(
    url: Annotated[str, typer.Argument(help="base URL of a vLLM server, without /v1")],
    replica: Annotated[int | None, typer.Option(min=0, help="of a fleet on Ray Serve: its rank")] = None,
    metrics_port: Annotated[
        int, typer.Option(min=0, max=65_535, help="the server's continuum.metrics_port")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Whether continuum is on, what it brings, and what is wrong. Exit status 1: off, or wrong."""
    at = base_url(url)
    name = at if replica is None else f"{at}, replica {replica}"
    found = statuses.status_of(name, scrape(at, replica, metrics_port))
    if as_json:
        print(json.dumps(found, indent=1, default=plain))
    else:
        statuses.show(found, Console())
    raise typer.Exit(0 if found["ok"] else 1)


@app.command()
def top(
    url: Annotated[str, typer.Argument(help="base URL of a server that runs continuum")],
    once: Annotated[bool, typer.Option(help="one look, instead of one a second")] = False,
    as_json: Json = False,
) -> None:
    """What each program does now: runs, waits and behind what, or is at a tool and pinned until when."""
    at, console = base_url(url), Console()
    if not console.is_terminal:  # a script's
        console.width = LINE_COLUMNS
    if as_json:
        print(json.dumps(tops.ranks_of(at), indent=1))
    elif once:
        console.print(tops.view(at, tops.ranks_of(at)))
    else:
        tops.watch(at, console)


@app.command()
def report(
    run: Annotated[str, typer.Argument(help="a recording, file or directory, or a running server's URL")],
    other: Annotated[str, typer.Argument(help="a second one, shown beside it")] = "",
    out: Annotated[Path, typer.Option(help="the page to write")] = Path("report.html"),
    program: Annotated[
        str, typer.Option(help="instead of a page, every event and decision of this one")
    ] = "",
    as_json: Json = False,
) -> None:
    """What happened in a recorded run, as one HTML page that needs no network; or in two, side by side."""
    with ExitStack() as stack:
        given = [each for each in (run, other) if each]
        paths = [recorded(each, stack) for each in given]
        if program:
            print(*story(paths[0], program), sep="\n")
            return
        runs = [replace(load(path), name=each) for path, each in zip(paths, given, strict=True)]
    if as_json:
        found = [{"name": one.name, "summary": summary(one), **figures(one)} for one in runs]
        print(json.dumps({"schema": 1, "runs": found}, indent=1))
        return
    from continuum_lmcache.report.page import page  # plotly is an extra and takes a second

    text = page(runs)
    out.write_text(text, encoding="utf-8")
    for one in runs:
        print(f"{one.name}: {summary(one)}")
    print(f"wrote {out}: {len(text) / 1e6:.1f} MB, no network needed")


def recorded(run: str, stack: ExitStack) -> Path:
    """The run's file or folder; of a server, its recording so far in a folder that the stack removes."""
    if "://" not in run:
        return Path(run)
    at = base_url(run)
    folder = Path(stack.enter_context(TemporaryDirectory())) / at.partition("://")[2].replace(":", "-")
    folder.mkdir()
    tops.save_recordings(at, folder)
    return folder


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, or `arguments`, and end bad input in one line."""
    try:
        status = app(arguments, standalone_mode=False)
    except TyperException as error:
        raise refused(error.format_message()) from error
    except (ContinuumError, OSError) as error:
        raise refused(str(error)) from error
    except (typer.Abort, KeyboardInterrupt) as error:
        raise refused("interrupted") from error
    sys.exit(status or 0)


def refused(reason: str) -> SystemExit:
    print(f"continuum-lmcache: {' '.join(reason.split())}", file=sys.stderr)
    return SystemExit(BAD_INPUT)
