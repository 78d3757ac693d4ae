"""H1's programs (a published sweep of eight short turns), live, at two loads, with and without LMCache.

Every contender is a separate server. As many as fit into the GPU's memory start together; then each in turn
serves the same programs while the others are idle. After that the simulator predicts each run from the
profile that was measured before, to show how accurate the simulator is on this machine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import yaml

from experiments import policies
from experiments.client import ServerUnusable
from experiments.demo_servers import CONTINUUM, FCFS, ORDER, with_tiers
from experiments.demo_servers import Contender as Offloading
from experiments.gpu.place import GB, Place
from experiments.mp_server import serve_mp
from experiments.replay import SHARED_PREFIX_TOKENS, Job, replay
from experiments.selection import Selection
from experiments.server import ServerError, serve
from experiments.sim.engine import simulate
from experiments.sim.serving import STOCK, Setup
from experiments.sim.step_time import Machine
from experiments.sim.workloads import seeds_sweep
from experiments.workload import Program


@dataclass(frozen=True, slots=True)
class Load:
    """Programs' arrivals on a server that served another load before."""

    share: float  # of what the machine could finish a second, nothing computed twice
    seed: int  # of arrivals and tokens: another than before, else LMCache would hold these prompts


LOADS = {"twice": Load(2.0, 3), "below": Load(0.6, 4)}  # the most telling first: time may run out
PROGRAMS_SEED = 3
SHARED_GPU = 0.92  # of the card's memory, for all servers that are up
START_S = 300.0  # four servers at once on an H200 whose disk was cold: 160 to 185 s


@dataclass(frozen=True, slots=True)
class Contender:
    """One server."""

    order: str  # fcfs: stock vLLM; a policy of ours
    offloading: Offloading | None

    @property
    def label(self) -> str:
        return f"{self.order}{'+LMCache' if self.offloading else ''}"


CONTENDERS = (  # as above: time may run out
    Contender("fcfs", None),
    Contender("continuum", None),
    Contender("fcfs", FCFS),
    Contender("continuum", CONTINUUM),
    Contender("program-fcfs", None),
    Contender("program-fcfs", ORDER),
)


@dataclass(frozen=True, slots=True)
class Server:
    """A contender that answers."""

    who: Contender
    url: str


def programs(place: Place) -> tuple[Program, ...]:
    """The sweep's jobs. Arrivals are drawn later, for a load."""
    return seeds_sweep(jps=place.programs, seed=PROGRAMS_SEED, arrive_s=3.0)[: place.programs]


def written(found: Sequence[Program], path: Path) -> Path:
    """As a trace that Selection reads."""
    path.write_text("".join(json.dumps(asdict(p)) + "\n" for p in found))
    return path


def selection(trace: Path, place: Place, jps: float, seed: int = PROGRAMS_SEED) -> Selection:
    return Selection(seed, trace=trace, jps=jps, max_context_tokens=place.window_tokens - 256)


def capacity_jps(machine: Machine, found: Sequence[Program], batch: int = 8) -> float:
    """Programs a second that this machine finishes at most, `batch` of them decoding at once."""
    work_s = 0.0
    for program in found:
        for turn in program.turns:
            work_s += machine.seconds([(turn.new_tokens, turn.kept_tokens)])
            work_s += turn.output_tokens * machine.seconds([(1, turn.context_tokens)] * batch) / batch
    return len(found) / work_s


def measured(
    place: Place,
    model: Path,
    profile: Path,
    out: Path,
    until_s: float,
    save: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Every contender at every load, until time runs out (`until_s` on time.monotonic).

    `save` gets all results after every run, so that a failing run loses none.
    """
    machine = machine_of(profile, place)
    trace = written(programs(place), out / "programs.jsonl")
    chosen = selection(trace, place, 1.0).programs(lambda _: None)
    rates = {name: load.share * capacity_jps(machine, chosen) for name, load in LOADS.items()}
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    for group in groups(place):
        left_s = until_s - time.monotonic()
        if left_s < 30:
            left_out |= {who.label: "no time was left" for who in group}
            continue
        with ExitStack() as until:
            servers = []
            for who, came in started(group, place, model, profile, out, min(START_S, left_s), until):
                if isinstance(came, ServerError):
                    left_out[who.label] = str(came)
                else:
                    servers.append(Server(who, came))
            for (load, jps), server in product(rates.items(), servers):
                rows.append(replayed(server, load, jps, trace, place, machine, out, until_s))
                save({"jps": rates, "programs": place.programs, "rows": rows})
    failures = (row for row in rows if row["errors"])
    failed = [f"{row['label']} at {row['load']}: {row['errors']} turns failed" for row in failures]
    failed += [f"{label} was left out: {why.splitlines()[0]}" for label, why in left_out.items()]
    return {"jps": rates, "programs": place.programs, "rows": rows, "failed": "; ".join(failed)}


def machine_of(profile: Path, place: Place) -> Machine:
    return Machine.from_profile(yaml.safe_load(profile.read_text()), profile.name, place.kv_tokens)


def groups(place: Place) -> list[tuple[Contender, ...]]:
    """Contenders whose servers fit the memory together; on a CPU one at a time."""
    at_once = 1
    if place.on_gpu:
        total_gb = torch.cuda.get_device_properties(0).total_memory / GB
        at_once = max(1, int(SHARED_GPU * total_gb / place.server_gb()))
    return [CONTENDERS[at : at + at_once] for at in range(0, len(CONTENDERS), at_once)]


def started(
    group: Sequence[Contender],
    place: Place,
    model: Path,
    profile: Path,
    out: Path,
    start_s: float,
    until: ExitStack,
) -> Iterator[tuple[Contender, str | ServerError]]:
    """All servers of a group, started together; the URL, or why there is none."""

    def start(who: Contender) -> tuple[str | ServerError, ExitStack]:
        own = ExitStack()
        try:
            return up(who, place, model, profile, out, start_s, own), own
        except ServerError as error:
            own.close()
            return error, own

    with ThreadPoolExecutor(len(group)) as pool:
        found = list(pool.map(start, group))
    for _, own in found:
        until.push(own)
    yield from ((who, came) for who, (came, _) in zip(group, found, strict=True))


def up(
    who: Contender, place: Place, model: Path, profile: Path, out: Path, start_s: float, until: ExitStack
) -> str:
    """Start LMCache's server if there is one, and vLLM's; the URL. Raises ServerError."""
    scheduling = "fcfs" if who.order == "fcfs" else "continuum"
    args = ["--scheduling-policy", scheduling, "--max-model-len", str(place.window_tokens)]
    args += ["--num-gpu-blocks-override", str(place.gpu_blocks), "--max-num-seqs", str(place.max_seqs)]
    args += ["--max-num-batched-tokens", str(place.step_tokens)]
    args += ["--load-format", "dummy"] if place.dummy_weights else []
    if place.on_gpu:
        total_gb = torch.cuda.get_device_properties(0).total_memory / GB
        args += ["--gpu-memory-utilization", f"{min(0.9, place.server_gb() / total_gb):.3f}"]
        # The size is given: servers that start together would each count the others' weights as their own.
        args += ["--kv-cache-memory-bytes", str(place.kv_bytes)]
    env = {"CONTINUUM_PROFILE": str(profile.resolve())}
    if scheduling == "continuum":
        env["CONTINUUM_POLICY"] = policies.setting(who.order)
    if who.offloading is not None:
        disk = (out / f"disk-{who.label}").resolve()
        ours = who.offloading.is_ours
        log = out / f"{who.label}-lmcache.log"
        mp = until.enter_context(serve_mp(place.dram_gib, disk, log, module=ours, disk_gb=place.ssd_gb))
        config = who.offloading.transfer_config(mp)
        config["kv_connector_extra_config"] = {
            key: value
            for key, value in config["kv_connector_extra_config"].items()
            if not key.startswith("continuum.")  # the environment has them
        }
        args += ["--kv-transfer-config", json.dumps(config)]
    log = out / f"{who.label}-server.log"
    serving = serve(model, args, log=log, env=env, start_s=start_s, on_gpu=place.on_gpu)
    return until.enter_context(serving)


def replayed(
    server: Server,
    load: str,
    jps: float,
    trace: Path,
    place: Place,
    machine: Machine,
    out: Path,
    until_s: float,
) -> dict[str, Any]:
    """One load: the measured figures, and the simulator's."""
    who, chosen = server.who, selection(trace, place, jps, LOADS[load].seed)
    row: dict[str, Any] = {"label": who.label, "load": load, "jps": jps, "errors": 0}
    limit_s = until_s - time.monotonic()
    if limit_s < 10:
        return row | {"cut": place.programs}
    try:
        job = Job(f"{server.url}/v1", f"{who.label}-{load}", chosen, out)
        summary = with_tiers(replay(job, limit_s), {})
    except ServerUnusable as error:
        return row | {"errors": place.programs, "why": str(error)}
    job.path.with_suffix(".json").write_text(json.dumps(summary, indent=1) + "\n")
    row |= {
        "mean_s": summary["job_time_s"].get("mean"),
        "p95_s": summary["job_time_s"].get("p95"),
        "ttft_max_s": summary["ttft_s"].get("max"),
        "tokens": summary["tokens_by_source"],
        "errors": summary["errors"],
        "cut": len(summary["cut_s"]),
    }
    return row | {"predicted": predicted(who, chosen, place, machine)}


def predicted(who: Contender, chosen: Selection, place: Place, machine: Machine) -> dict[str, Any]:
    """The simulator's mean job time for the same programs, in seconds. A server that was probed first was
    predicted no better, and with LMCache three times too slow: it was still writing to its disk."""
    tiers = None
    if who.offloading is not None:
        tiers = {
            "dram_gb": place.dram_gib,
            "ssd_gb": place.ssd_gb * GB / 2**30,
            "chunk_tokens": 256,
            "save_decode_cache": True,
        }
    setup = Setup(
        policy=STOCK if who.order == "fcfs" else who.order,
        tiers=tiers,
        machine=machine,
        step_tokens=place.step_tokens,
        max_seqs=place.max_seqs,
        block_tokens=place.block_tokens,
        shared_tokens=SHARED_PREFIX_TOKENS,
        async_scheduling=place.on_gpu,
    )
    result = simulate(chosen.programs(lambda _: None), setup)
    return {"mean_s": result.mean_job_s, "tokens": dict(result.tokens)}


def off_by(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Predicted over measured mean job time, less 1, of complete runs."""
    whole = [row for row in rows if "predicted" in row and not row["cut"]]
    return [row["predicted"]["mean_s"] / row["mean_s"] - 1 for row in whole]
