"""Runs a Live case: starts a server, replays the programs against it, and collects the figures of both."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from experiments import policies
from experiments.driver import identity
from experiments.mp_server import OURS, serve_mp
from experiments.peers import live as peers
from experiments.peers.install import missing
from experiments.replay import Job, replay
from experiments.selection import Selection
from experiments.server import fast_dtype, serve
from experiments.sim.fitted_programs import shapes
from experiments.sim.trace_programs import SOURCES
from experiments.sweep.cases import PEERS, ROUTERS, STOCK, Live, SweepError
from experiments.sweep.conditions import probe_s
from experiments.table1 import GENERATORS
from experiments.tiny_model import KV_BYTES_PER_TOKEN, make_model, profile_here

ROOT = Path(__file__).parents[2]
WATERMARK = 0.8  # LMCache's default: the share of L1 above which it evicts
FREE_WINDOWS = 2  # of L1, beside the case's DRAM, where there is a disk


# The small model's server has the proportions of the paper's offload experiment: GPU KV for about seven mean
# final contexts, and tool times of a third of the work (Continuum, arXiv 2511.02230, Fig. 9). Sizes in GB,
# here and in a case, are those of KV in bfloat16. In float32 a server gets twice the bytes.
DTYPE = fast_dtype()
GPU_BLOCKS, BLOCK_TOKENS, WINDOW_TOKENS = 120, 128, 4096
CHUNK_TOKENS = 128  # LMCache's
TIME_SCALE = 0.125  # of tool gaps
TOKEN_GB = KV_BYTES_PER_TOKEN["bfloat16"] / 1e9
KV_GB, WINDOW_GB = GPU_BLOCKS * BLOCK_TOKENS * TOKEN_GB, WINDOW_TOKENS * TOKEN_GB
SERVED = KV_BYTES_PER_TOKEN[DTYPE] / KV_BYTES_PER_TOKEN["bfloat16"]  # bytes over those of bfloat16
GIB = 2**30 / 1e9  # in which LMCache counts, in GB


def run(case: Live, keep: Path) -> dict[str, Any]:
    """Serve, replay, stop; the figures (of rows.FIGURES). Turns and logs stay in `keep`, the case's folder.

    Nothing is measured before all servers are healthy; `start_s` is the time until then.
    Raises SweepError for unknown names and failed turns, ServerError, ServerUnusable.
    """
    policy, chosen = policy_of(case.contender), selection_of(case)
    keep.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    with ExitStack() as until:
        folder = Path(until.enter_context(tempfile.TemporaryDirectory(prefix="continuum-live-")))
        args, env = arguments(case, policy)
        tiers = until.enter_context(mp_tiers(case, folder, keep))
        model = make_model(ROOT / ".work" / "tiny-model")
        engine = until.enter_context(serve(model, [*args, *tiers], log=keep / "server.log", env=env))
        url, says = engine, identity
        if case.contender in PEERS:
            says = peers.identity
        if case.contender in ROUTERS:
            tokens, log = GPU_BLOCKS * BLOCK_TOKENS, keep / "router.log"
            url = until.enter_context(peers.router(case.contender, profile_here(), tokens, engine, log))
        start_s, before_s = time.monotonic() - began_s, probe_s()
        summary = replay(Job(f"{url}/v1", case.label, chosen, keep, identify=says, engine_url=engine))
        after_s = probe_s()
    if summary["errors"]:
        raise SweepError(f"{case}: {summary['errors']} turns failed; the lines above say why")
    machine_then = {"start_s": start_s, "probe_s": (before_s + after_s) / 2}
    return figures(summary, summary["job_times_s"]) | machine_then


def selection_of(case: Live) -> Selection:
    """The case's programs, of a size that the server can hold. Raises SweepError for unknown names."""
    name, _, half = case.workload.partition(":")
    known = [*GENERATORS, *shapes(), *(f"{source}:HALF" for source in SOURCES)]
    if case.workload not in GENERATORS and name not in (SOURCES if half else shapes()):
        raise SweepError(f"workload is {case.workload!r}; known: {', '.join(known)}")
    if case.ssd_gb and not case.dram_gb:
        raise SweepError(f"{case}: LMCache's disk tier needs a DRAM tier in front of it; give dram_gb")
    return Selection(
        case.seed,
        generator=case.workload,
        count=case.programs,
        jps=case.jps,
        max_context_tokens=WINDOW_TOKENS,
        time_scale=TIME_SCALE,
    )


def policy_of(contender: str) -> str | None:
    """The policy of our scheduler; None: vLLM's own, or a peer's."""
    if contender in (STOCK, *PEERS):
        if reason := missing(contender):
            raise SweepError(f"{contender} is not here: {reason}")
        return None
    if ":" not in contender and contender not in policies.known():
        known = ", ".join(dict.fromkeys([STOCK, *PEERS, *policies.known()]))
        raise SweepError(f"contender is {contender!r}; known to --engine live: {known}")
    return policies.setting(contender)


def arguments(case: Live, policy: str | None) -> tuple[list[str], dict[str, str]]:
    """The server's arguments and environment, without its tiers."""
    args = ["--dtype", DTYPE, "--max-model-len", str(WINDOW_TOKENS)]
    args += ["--num-gpu-blocks-override", str(GPU_BLOCKS)]
    env: dict[str, str] = {}
    if case.contender in PEERS:
        more, env = peers.served(case.contender, profile_here())
        args += more
    if policy is not None:
        args += ["--scheduling-policy", "continuum"]
        profile = str(ROOT / "profiles" / profile_here())
        env |= {"CONTINUUM_POLICY": policy, "CONTINUUM_PROFILE": profile}
    return args, env


@contextmanager
def mp_tiers(case: Live, folder: Path, keep: Path) -> Iterator[list[str]]:
    """An `lmcache server` with the case's tiers, if it has any; vLLM's arguments for it."""
    if not case.dram_gb:
        yield []
        return
    l1_gb, watermark = l1_of(case)
    more = ["--chunk-size", str(CHUNK_TOKENS), "--eviction-trigger-watermark", f"{watermark:.3f}"]
    log, disk, disk_gb = keep / "lmcache.log", folder / "disk", SERVED * case.ssd_gb
    with serve_mp(SERVED * l1_gb / GIB, disk, log, *more, disk_gb=disk_gb) as mp:
        yield ["--kv-transfer-config", json.dumps(mp.transfer_config | OURS)]


def l1_of(case: Live) -> tuple[float, float]:
    """L1's size in GB, and the share above which LMCache evicts from it.

    With a disk L1 has free room beside the case's DRAM, for a prompt that is read from L2 and for what is
    stored between two evictions (docs/lmcache.md): a prompt that does not fit is not read.
    """
    if not case.ssd_gb:
        return case.dram_gb, WATERMARK
    l1_gb = case.dram_gb + FREE_WINDOWS * WINDOW_GB
    return l1_gb, case.dram_gb / l1_gb


def figures(summary: Mapping[str, Any], job_times_s: list[float]) -> dict[str, Any]:
    """A row's figures of a replay (experiments/summary.py): seconds, tokens, counts."""
    jobs, ttft = summary["job_time_s"], summary["ttft_s"]
    outcomes = ("taken", "reused", "expired", "reclaimed")
    return {
        "job_mean_s": jobs["mean"],
        "job_p90_s": float(np.percentile(job_times_s, 90)),
        **{f"job_p{p}_s": jobs[f"p{p}"] for p in (50, 95, 99)},
        **{f"ttft_{figure}_s": ttft[figure] for figure in ("mean", "p99", "max")},
        "end_s": summary["wall_s"],
        "jobs": summary["finished"],
        "jobs_per_s": summary["jobs_per_s"],
        **{f"{source}_tokens": tokens for source, tokens in summary["tokens_by_source"].items()},
        "preemptions": round(summary["server"].get("vllm:num_preemptions_total", 0)),
        **{f"pins_{outcome}": summary["pins"].get(outcome, 0) for outcome in outcomes},
        "measured": True,
    }
