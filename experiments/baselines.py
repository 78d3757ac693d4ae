"""Compares stock LMCache with ours on real servers, in both of its modes, set up as LMCache documents them.

    python -m experiments.baselines --programs 16 --out baselines      # twelve servers, ten minutes

Each row is a new server with empty caches: one LMCache under one order of the queue. Stock is LMCache's
own connector, and a plain `lmcache server` in its multi-process mode, without this package's module,
defaults or fixes; "tuned" is stock with the options that docs/mp.md recommends. If a server dies, hangs,
refuses or never hits, its row says so, with the reason from its log. The machine, the programs and the tiers
are those of the live sweep (sweep/live.py). Leaves baselines.md and .csv, and the logs in OUT; a
row that is in OUT already is not measured again.
"""

from __future__ import annotations

import csv
import json
import math
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python PATH` as well as -m

from experiments.client import ServerUnusable
from experiments.mp_server import MpProcess, serve_mp
from experiments.replay import Job, replay
from experiments.server import ServerError, serve
from experiments.sweep.cases import Live
from experiments.sweep.live import MACHINES, ROOT, selection_of
from experiments.tables import markdown, plain
from experiments.tiny_model import make_model

MACHINE = MACHINES["cpu-tiny"]
DRAM_GB, SSD_GB = 2 * MACHINE.kv_gb, 4 * MACHINE.kv_gb
V1 = "vllm.distributed.kv_transfer.kv_connector.v1."
EXCEPTION = re.compile(r"(?:^|[\]\s])((?:\w+\.)*\w+(?:Error|Exception)\b(?:: .*)?)$")
ERROR = re.compile(r"(LMCache ERROR: .*)")
COLOUR = re.compile(r"\x1b\[[\d;]*m")


@dataclass(frozen=True, slots=True)
class Lmcache:
    """One way to run LMCache."""

    name: str
    connector: Mapping[str, str]  # by module path, since our policy replaces LMCache's own
    is_ours: bool
    mp: bool = False
    tuned: bool = False  # with the options and the connector's defaults that docs/mp.md gives


IN_PROCESS = Lmcache(
    "stock, in-process",
    {"kv_connector": "LMCacheConnectorV1", "kv_connector_module_path": V1 + "lmcache_connector"},
    is_ours=False,
)
MP = Lmcache(
    "stock, MP as LMCache documents it",
    {"kv_connector": "LMCacheMPConnector", "kv_connector_module_path": V1 + "lmcache_mp_connector"},
    is_ours=False,
    mp=True,
)
OUR_IN_PROCESS = Lmcache(
    "ours, in-process",
    {"kv_connector": "ContinuumLMCacheConnector", "kv_connector_module_path": "connectors.lmcache"},
    is_ours=True,
)
OUR_MP = Lmcache(
    "ours, MP",
    {"kv_connector": "ContinuumLMCacheMPConnector", "kv_connector_module_path": "connectors.lmcache_mp"},
    is_ours=True,
    mp=True,
    tuned=True,
)
MP_TUNED = Lmcache("stock, MP tuned as in docs/mp.md", MP.connector, is_ours=False, mp=True, tuned=True)
POLICIES = {"fcfs": None, "program order": "program-fcfs", "continuum": "continuum"}  # of our scheduler


@dataclass(frozen=True, slots=True)
class Contender:
    """One row."""

    lmcache: Lmcache
    policy: str

    @property
    def label(self) -> str:
        """In file names."""
        return re.sub(r"\W+", "-", f"{self.lmcache.name} {self.policy}")


CONTENDERS = tuple(
    Contender(lmcache, policy)
    for lmcache in (IN_PROCESS, MP, MP_TUNED, OUR_IN_PROCESS, OUR_MP)
    for policy in POLICIES
    if policy != "continuum" or lmcache.is_ours  # which asks the connector where KV is
)


@dataclass(slots=True)
class Setup:
    """The start options of one server."""

    args: list[str]
    env: dict[str, str] = field(default_factory=dict)


def setup(who: Contender, folder: Path, mp: MpProcess | None) -> Setup:
    """vLLM's options and environment. `folder` is the row's own."""
    args = ["--dtype", MACHINE.dtype, "--max-model-len", str(MACHINE.window_tokens)]
    args += ["--num-gpu-blocks-override", str(MACHINE.gpu_blocks)]
    env: dict[str, str] = {}
    policy = POLICIES[who.policy]
    if policy is not None:
        args += ["--scheduling-policy", "continuum"]
        env |= {"CONTINUUM_POLICY": policy, "CONTINUUM_PROFILE": str(ROOT / "profiles" / MACHINE.profile)}
    config: dict[str, Any] = {**who.lmcache.connector, "kv_role": "kv_both"}
    if policy is None and not who.lmcache.is_ours:
        del config["kv_connector_module_path"]  # as anybody would: nothing replaces it there
    if mp is not None:
        extra = dict(mp.transfer_config["kv_connector_extra_config"])
        if who.lmcache.tuned and not who.lmcache.is_ours:  # ours does both by itself
            extra["lmcache.mp.save_decode_cache"] = True
            config["kv_load_failure_policy"] = "recompute"
        config["kv_connector_extra_config"] = extra
    else:  # as LMCache's documentation does it, and both can read
        env |= {
            "PYTHONHASHSEED": "0",
            "LMCACHE_CHUNK_SIZE": str(MACHINE.chunk_tokens),
            "LMCACHE_LOCAL_CPU": "True",
            "LMCACHE_MAX_LOCAL_CPU_SIZE": f"{MACHINE.gib(DRAM_GB):.4f}",
            "LMCACHE_LOCAL_DISK": f"file://{folder}/disk/",
            "LMCACHE_MAX_LOCAL_DISK_SIZE": f"{MACHINE.gib(SSD_GB):.4f}",
        }
    return Setup([*args, "--kv-transfer-config", json.dumps(config)], env)


def measured(who: Contender, case: Live, start_s: float, limit_s: float, out: Path) -> dict[str, Any]:
    """Serve, replay, stop; returns the row, also of a run that failed."""
    folder = out / who.label
    folder.mkdir(parents=True, exist_ok=True)
    log, mp_log = folder / "vllm.log", folder / "lmcache.log"
    model = make_model(ROOT / ".work" / "tiny-model")
    row: dict[str, Any] = {"lmcache": who.lmcache.name, "policy": who.policy}
    hits: Mapping[str, float] = {}
    begun_s = math.inf  # of the replay
    with ExitStack() as until:
        disk = Path(until.enter_context(tempfile.TemporaryDirectory(prefix="disk-", dir=out.resolve())))
        try:
            mp = None
            if who.lmcache.mp:
                flags = {"module": who.lmcache.is_ours, "tuned": who.lmcache.tuned}
                chunks = ("--chunk-size", str(MACHINE.chunk_tokens))
                l1_gib, disk_gb = MACHINE.gib(DRAM_GB), MACHINE.served_gb(SSD_GB)
                mp = until.enter_context(serve_mp(l1_gib, disk, mp_log, *chunks, disk_gb=disk_gb, **flags))
            how = setup(who, disk, mp)
            url = until.enter_context(serve(model, how.args, log=log, env=how.env, start_s=start_s))
            begun_s = time.monotonic()
            job = Job(f"{url}/v1", who.label, selection_of(case), folder, timeout_s=limit_s)
            summary = replay(job, limit_s)
            hits = mp.hits() if mp is not None else {}
        except (ServerError, ServerUnusable) as error:
            reasons = [str(error).splitlines()[0].rstrip(":"), cause(log, mp_log)]
            if time.monotonic() - begun_s > limit_s:
                reasons.insert(0, "cut off by the time limit")
            return row | {"programs": case.programs, "outcome": "; ".join(filter(None, reasons))}
    return row | figures(summary, hits) | {"outcome": outcome(summary, cause(log, mp_log))}


def figures(summary: Mapping[str, Any], hits: Mapping[str, float]) -> dict[str, Any]:
    """Seconds, tokens and counts. Stock reports no tiers: its tokens are split as its server found them."""
    jobs, ttft = summary["job_time_s"], summary["ttft_s"]
    tokens = dict(summary["tokens_by_source"])
    loaded = tokens.pop("offload", None)
    found = sum(hits.values())
    if loaded is not None:
        tokens["dram"] = round(loaded * hits["dram"] / found) if found else loaded
        tokens["ssd"] = loaded - tokens["dram"]
    return {
        "programs": summary["programs"],
        "finished": summary["finished"],
        "errors": summary["errors"],
        "job_mean_s": jobs.get("mean"),
        "ttft_median_s": ttft.get("p50"),
        "ttft_max_s": ttft.get("max"),
        **{f"{source}_tokens": tokens.get(source) for source in ("gpu", "dram", "ssd", "computed")},
    }


def outcome(summary: Mapping[str, Any], why: str) -> str:
    """What went wrong in a run that served; "" if nothing did."""
    found = []
    if summary["cut_s"]:
        found.append(f"cut off by the time limit with {len(summary['cut_s'])} programs running")
    if summary["errors"]:
        found.append(f"{summary['errors']} turns failed")
    tokens = summary["tokens_by_source"]
    if not sum(tokens.get(source, 0) for source in ("offload", "dram", "ssd")):
        found.append("not one hit in LMCache")
    return "; ".join([*found, *([why] if found and why else [])])


def cause(*logs: Path) -> str:
    """The first exception in the logs (others follow from it), or LMCache's first error; else ""."""
    texts = [log.read_text(errors="replace") for log in logs if log.exists()]
    lines = [COLOUR.sub("", line).rstrip() for text in texts for line in text.splitlines()]
    found = (match for pattern in (EXCEPTION, ERROR) for match in map(pattern.search, lines) if match)
    return next((f"{match[1]:.300}" for match in found), "")


HEADS = {
    "lmcache": "LMCache",
    "policy": "order",
    "job_mean_s": "mean job time, s",
    "ttft_median_s": "TTFT, median, s",
    "ttft_max_s": "longest, s",
    "gpu_tokens": "prompt tokens still on the GPU",
    "dram_tokens": "from DRAM",
    "ssd_tokens": "from disk",
    "computed_tokens": "computed",
    "errors": "failed turns",
    "finished": "finished",
    "programs": "of",
    "outcome": "what happened",
}


def table(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A header, then a line a row."""
    return [list(HEADS.values()), *([shown(row.get(name)) for name in HEADS] for row in rows)]


def shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value


def write(rows: Sequence[Mapping[str, Any]], caption: str, out: Path) -> None:
    """The table and the CSV, after every row."""
    text = "\n\n".join(["# Stock LMCache and ours, live", caption, markdown(table(rows))])
    (out / "baselines.md").write_text(text + "\n")
    with (out / "baselines.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, HEADS)
        writer.writeheader()
        writer.writerows(rows)


def rows_of(
    contenders: Sequence[Contender], case: Live, start_s: float, limit_s: float, out: Path
) -> Iterator[dict[str, Any]]:
    """The rows one by one; an existing one is read, not measured."""
    for who in contenders:
        path = out / f"{who.label}.json"
        if not path.exists():
            row = measured(who, case, start_s, limit_s, out)
            path.write_text(json.dumps(row, indent=1) + "\n")
        yield json.loads(path.read_text())


def main(
    programs: Annotated[int, typer.Option(min=1, help="agents, the same against every server")] = 16,
    jps: Annotated[float, typer.Option(min=1e-6, help="Poisson arrivals a second")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="of programs, arrivals and tokens")] = 1,
    start_s: Annotated[
        float, typer.Option(min=1, help="for a server to start; one that hangs is a row")
    ] = 60.0,
    limit_s: Annotated[float, typer.Option(min=1, help="for one replay; then it is cut off")] = 60.0,
    only: Annotated[str, typer.Option(help="rows with this in their name or order")] = "",
    out: Annotated[Path, typer.Option(help="rows, table and logs")] = Path("baselines"),
    docs: Annotated[Path | None, typer.Option(help="put the table and the CSV there; default: OUT")] = None,
) -> None:
    """Measure every missing row."""
    out.mkdir(parents=True, exist_ok=True)
    case = Live("fcfs", programs, jps, seed)
    chosen = [who for who in CONTENDERS if only in f"{who.lmcache.name} {who.policy}"]
    caption = (
        f"{programs} programs, {jps:g} a second, seed {seed}; at most {limit_s:g} s a row. KV cache "
        f"{MACHINE.kv_gb * 1e3:.0f} MB, DRAM {DRAM_GB * 1e3:.0f} MB, disk {SSD_GB * 1e3:.0f} MB."
    )
    console, rows = Console(width=200), []
    for row in rows_of(chosen, case, start_s, limit_s, out):
        rows.append(row)
        console.print(f"{row['lmcache']}, {row['policy']}: {row['outcome'] or 'served'}")
        write(rows, caption, docs or out)
    console.print(plain(table(rows), caption))


if __name__ == "__main__":
    typer.run(main)
