"""A Live case: a server of its own, the programs replayed against it, and what both say of the run."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from continuum_lmcache.retention.policies import POLICIES
from experiments.replay import Job, replay
from experiments.selection import Selection
from experiments.server import serve
from experiments.sim.trace_programs import SOURCES
from experiments.sweep.cases import STOCK, Live, SweepError
from experiments.table1 import GENERATORS
from experiments.tiny_model import make_model

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Machine:
    """A model on a machine, with the proportions of the paper's experiment (experiments/small_tiers.py)."""

    gpu_blocks: int
    block_tokens: int
    kv_bytes_per_token: int
    window_tokens: int
    chunk_tokens: int  # LMCache's
    time_scale: float  # of tool gaps
    profile: str  # in profiles/

    @property
    def kv_gb(self) -> float:
        """The GPU's KV cache, in GB."""
        return self.gpu_blocks * self.block_tokens * self.kv_bytes_per_token / 1e9


# by its path: with a policy of vLLM's own, LMCacheConnectorV1 is stock, and caches nothing on a CPU
OURS = {"kv_connector": "ContinuumLMCacheConnector", "kv_connector_module_path": "connectors.lmcache"}
MACHINES = {"cpu-tiny": Machine(120, 128, 8192, 4096, 128, 0.125, "cpu-tiny.yaml")}


def run(case: Live) -> dict[str, Any]:
    """Serve, replay, stop; the figures (rows.FIGURES).

    Raises SweepError for unknown names and failed turns, ServerError, ServerUnusable.
    """
    machine, policy, chosen = machine_of(case), policy_of(case.contender), selection_of(case)
    with tempfile.TemporaryDirectory(prefix="continuum-live-") as folder:
        args, env = arguments(case, machine, policy, Path(folder))
        model = make_model(ROOT / ".work" / "tiny-model")
        with serve(model, args, log=Path(folder, "server.log"), env=env) as url:
            summary = replay(Job(f"{url}/v1", case.label, chosen, Path(folder)))
        job_times_s = summary["job_times_s"]
    if summary["errors"]:
        raise SweepError(f"{case}: {summary['errors']} turns failed; the lines above say why")
    return figures(summary, job_times_s)


def machine_of(case: Live) -> Machine:
    if case.machine not in MACHINES:
        raise SweepError(f"machine is {case.machine!r}; known to --engine live: {', '.join(MACHINES)}")
    if case.workload not in GENERATORS and case.workload.partition(":")[0] not in SOURCES:
        raise SweepError(f"workload is {case.workload!r}; known: {', '.join([*GENERATORS, *SOURCES])}")
    if case.ssd_gb and not case.dram_gb:
        raise SweepError(f"{case}: LMCache's disk tier needs a DRAM tier in front of it; give dram_gb")
    return MACHINES[case.machine]


def selection_of(case: Live) -> Selection:
    """The case's programs, of a size that its machine can serve. Raises SweepError for unknown names."""
    machine = machine_of(case)
    return Selection(
        case.seed,
        generator=case.workload,
        count=case.programs,
        jps=case.jps,
        max_context_tokens=machine.window_tokens,
        time_scale=machine.time_scale,
    )


def policy_of(contender: str) -> str | None:
    """The policy of our scheduler; None: vLLM's own."""
    if contender != STOCK and contender not in POLICIES:
        known = ", ".join(dict.fromkeys([STOCK, *POLICIES]))
        raise SweepError(f"contender is {contender!r}; known to --engine live: {known}")
    return None if contender == STOCK else contender


def arguments(
    case: Live, machine: Machine, policy: str | None, folder: Path
) -> tuple[list[str], dict[str, str]]:
    """The server's arguments and environment. The connector's file goes into `folder`."""
    args = ["--max-model-len", str(machine.window_tokens)]
    args += ["--num-gpu-blocks-override", str(machine.gpu_blocks)]
    env: dict[str, str] = {}
    if case.dram_gb:
        path = folder / "lmcache.json"
        path.write_text(json.dumps(connector(case, machine, folder / "disk"), indent=1))
        args += ["--kv-transfer-config", str(path)]
    if policy is not None:
        args += ["--scheduling-policy", "continuum"]
        profile = str(ROOT / "profiles" / machine.profile)
        env |= {"CONTINUUM_POLICY": policy, "CONTINUUM_PROFILE": profile}
    return args, env


def connector(case: Live, machine: Machine, disk: Path) -> dict[str, Any]:
    """The repository's lmcache.json with the case's tiers and, whatever the policy, our connector."""
    config: dict[str, Any] = json.loads((ROOT / "lmcache.json").read_text())
    extra = {
        name: value
        for name, value in config["kv_connector_extra_config"].items()
        if "disk" not in name  # no tier that the case does not name
    }
    extra |= {"lmcache.chunk_size": machine.chunk_tokens, "lmcache.max_local_cpu_size": gib(case.dram_gb)}
    if case.ssd_gb:
        extra |= {"lmcache.local_disk": f"file://{disk}/", "lmcache.max_local_disk_size": gib(case.ssd_gb)}
    return config | OURS | {"kv_connector_extra_config": extra}


def gib(gb: float) -> float:
    """LMCache counts in GiB."""
    return gb * 1e9 / 2**30


def figures(summary: Mapping[str, Any], job_times_s: list[float]) -> dict[str, Any]:
    """What a row says of a replay (experiments/summary.py): seconds, tokens, counts."""
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
