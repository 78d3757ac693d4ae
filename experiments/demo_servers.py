"""The demo's servers: one that measures the machine, and three that are compared, with LMCache beside them.

All three get the same KV cache, the same LMCache server settings and the same tiers; LMCache runs in its
multi-process mode. The baselines keep LMCache's own connector and an `lmcache server` without this
package's module. They too get what docs/lmcache.md recommends where LMCache's default would hurt
them: generated tokens are stored, what is read from the disk stays in DRAM, KV goes through shared
memory, and a load that fails is computed.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from continuum_lmcache.errors import TraceError
from experiments import policies
from experiments.demo_scenario import (
    BLOCK_TOKENS,
    WINDOWS_TOKENS,
    Measured,
    Scenario,
    Work,
    rate,
    time_scale,
)
from experiments.driver import TurnRecord
from experiments.mp_server import OURS, MpProcess, serve_mp
from experiments.replay import Job, replay
from experiments.selection import Selection
from experiments.server import ServerError, fast_dtype, serve, tail
from experiments.summary import figures
from experiments.tiny_model import profile_here

ROOT = Path(__file__).parents[1]
LMCACHES_OWN = {  # vLLM's own name and module: no plugin replaces a connector whose module is given
    "kv_connector": "LMCacheMPConnector",
    "kv_connector_module_path": "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_mp_connector",
}
# The worker is in the engine's process, as on one GPU: a server starts in two thirds of the time.
IN_ENGINE_ARGS = ("--distributed-executor-backend", "uni")
IN_ENGINE_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else vLLM refuses "uni" on a CPU
    "OMP_NUM_THREADS": "1",  # as vLLM gives a worker of its own that has one core
}
SHARED_MEMORY = Path("/dev/shm")
DISK_BYTES = 2 * 2**30  # free, for LMCache's files
ALONE_S, BURST_S = 12.0, 25.0  # at most
ALONE_TURNS, ALONE_SEEDS = 3, 20  # at least, of the program that is alone; seeds that may draw it
BURST, AT_ONCE_JPS = 8, 1e6  # programs


@dataclass(frozen=True, slots=True)
class Contender:
    """A server that is compared."""

    label: str  # in file names
    name: str  # in tables
    scheduling: str  # --scheduling-policy
    connector: dict[str, str]
    env: dict[str, str]

    @property
    def is_ours(self) -> bool:
        return self.connector is OURS

    def transfer_config(self, mp: MpProcess) -> dict[str, Any]:
        """The value of `--kv-transfer-config`."""
        config = mp.transfer_config | self.connector | {"kv_load_failure_policy": "recompute"}
        extra = config["kv_connector_extra_config"] | {"lmcache.mp.save_decode_cache": True}
        return config | {"kv_connector_extra_config": extra}


FCFS = Contender("fcfs", "fcfs + LMCache", "fcfs", LMCACHES_OWN, {})
ORDER = Contender(
    "program-order",
    "program order + LMCache",
    "continuum",
    LMCACHES_OWN,
    {"CONTINUUM_POLICY": policies.setting("program-fcfs")},
)
CONTINUUM = Contender(
    "continuum",
    "continuum + LMCache",
    "continuum",
    OURS,
    {"CONTINUUM_PROFILE": str(ROOT / "profiles" / profile_here())},
)


def check_room(out: Path, l1_bytes: float) -> None:
    """Raises ServerError where LMCache would not have room for its tiers."""
    for folder, needed_bytes, what in (
        (SHARED_MEMORY, l1_bytes, "LMCache's DRAM; in a container give it more (docker: --shm-size)"),
        (out, DISK_BYTES, "LMCache's disk; choose another folder with --out"),
    ):
        if not folder.exists():
            raise ServerError(f"{folder} does not exist: LMCache needs shared memory as Linux has it")
        free_bytes = shutil.disk_usage(folder).free
        if free_bytes < needed_bytes:
            raise ServerError(
                f"{folder} has {free_bytes / 2**20:.0f} MiB free, and {needed_bytes / 2**20:.0f} are needed "
                f"for {what}"
            )


def compared(who: Contender, scenario: Scenario, selection: Selection, model: Path, out: Path) -> Path:
    """Serve, replay, stop; the summary's path. Raises ServerError, ServerUnusable."""
    name = f"{who.label}-seed{selection.seed}"
    dtype = fast_dtype()
    check_room(out, scenario.l1_gb(dtype) * 2**30)
    with (
        tempfile.TemporaryDirectory(prefix="lmcache-disk-", dir=out) as disk,
        serve_mp(
            scenario.l1_gb(dtype),
            Path(disk).resolve(),
            out / f"{name}-lmcache.log",
            *("--chunk-size", str(BLOCK_TOKENS)),
            *("--eviction-trigger-watermark", f"{scenario.watermark:.3f}"),
            module=who.is_ours,
            wait=False,
        ) as mp,
    ):
        config = out / f"{name}-kv-transfer.json"
        config.write_text(json.dumps(who.transfer_config(mp), indent=1) + "\n")
        args = ["--scheduling-policy", who.scheduling, "--dtype", dtype, "--kv-transfer-config", str(config)]
        args += ["--max-model-len", str(scenario.window_tokens)]
        args += ["--num-gpu-blocks-override", str(scenario.gpu_blocks)]
        log = out / f"{name}-server.log"
        with serve(model, [*args, *IN_ENGINE_ARGS], log=log, env=IN_ENGINE_ENV | who.env) as url:
            mp.wait_until_healthy()
            job = Job(f"{url}/v1", who.label, selection, out)
            summary = replay(job, scenario.limit_s)
            refuse_failures(summary, job, log)
            hits = mp.hits()
    path = job.path.with_suffix(".json")
    path.write_text(json.dumps(with_tiers(summary, hits) | {"jps": scenario.jps}, indent=1) + "\n")
    return path


def refuse_failures(summary: dict[str, Any], job: Job, log: Path) -> None:
    """Raises ServerError if turns failed: the servers could not be compared."""
    errors = [r.error for r in records_of(job.path) if r.error is not None]
    if errors:
        raise ServerError(
            f"{summary['errors']} turns failed under {job.label}, the first with: {errors[0]}\n"
            f"the server's log ({log}) ends:\n{tail(log)}"
        )


def with_tiers(summary: dict[str, Any], hits: dict[str, float]) -> dict[str, Any]:
    """The summary with LMCache's tokens by tier, those computed again, and cut programs at their time so far.

    LMCache's own connector does not report tiers: its tokens are split as the `lmcache server` counted them
    at the lookup.
    """
    sources = dict(summary["tokens_by_source"])
    if "offload" in sources:
        loaded, found = sources.pop("offload"), sum(hits.values())
        sources["dram"] = round(loaded * hits["dram"] / found) if found else loaded
        sources["ssd"] = loaded - sources["dram"]
    sources["again"] = max(0, sources.get("computed", 0) - summary["new_tokens"])
    sources["computed"] = sources.get("computed", 0) - sources["again"]
    times_s = sorted(summary["job_times_s"] + summary["cut_s"])
    changed = {"tokens_by_source": sources, "job_times_s": times_s, "job_time_s": figures(times_s)}
    return summary | changed


def records_of(path: Path) -> list[TurnRecord]:
    """A replay's turns, in the order in which they ended."""
    return [TurnRecord(**json.loads(line)) for line in path.read_text().splitlines()]


def alone_seed(selection: Selection) -> int:
    """The first seed that draws a program of ALONE_TURNS turns or more. Raises TraceError if none does."""
    for seed in range(1, ALONE_SEEDS + 1):
        (program,) = replace(selection, seed=seed, count=1, jps=1.0).programs(lambda _: None)
        if len(program.turns) >= ALONE_TURNS:
            return seed
    raise TraceError(
        f"{selection.name}: of {ALONE_SEEDS} programs drawn none has {ALONE_TURNS} turns, which it takes to "
        "measure the machine; give programs that call tools"
    )


def measured(selection: Selection, work: Work, model: Path, out: Path) -> Measured:
    """Stock vLLM's speed here with ample memory. Raises ServerError, ServerUnusable, TraceError.

    One program alone, without its tools; then several at once, with their tools. Both may be cut off.
    """
    seed = alone_seed(selection)
    log = out / "measure-server.log"
    args = ["--scheduling-policy", "fcfs", "--dtype", fast_dtype(), "--max-model-len", str(WINDOWS_TOKENS[0])]
    begun_s = time.monotonic()
    with serve(model, [*args, *IN_ENGINE_ARGS], log=log, env=IN_ENGINE_ENV) as url:
        start_s = time.monotonic() - begun_s

        def turns(label: str, limit_s: float, **how: Any) -> list[TurnRecord]:
            job = Job(f"{url}/v1", f"measure-{label}", replace(selection, **how), out)
            refuse_failures(replay(job, limit_s), job, log)
            records = records_of(job.path)
            if len(records) < 2:
                raise ServerError(
                    f"the server answered {len(records)} turns in {limit_s:.0f} s: this machine is too slow "
                    f"for the demo, or busy with something else"
                )
            return records

        one = {"count": 1, "seed": seed, "jps": 1.0, "time_scale": 0.0}
        alone = turns("alone", ALONE_S, **one)[1:]  # the first one warms up
        turn_s = statistics.mean(r.t_done - r.t_sent for r in alone if r.t_done is not None)
        scale = time_scale(turn_s, work)
        count = min(BURST, work.programs or BURST)
        burst = turns("burst", BURST_S, count=count, jps=AT_ONCE_JPS, time_scale=scale)
    return Measured(start_s, turn_s, rate(burst, round(count * work.turns)))
