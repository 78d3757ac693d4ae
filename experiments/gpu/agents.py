"""N live sessions of real agents, live, on one card; and what `continuum` costs where it can gain nothing.

Every contender is a separate server. As many as fit into the GPU's memory start together, on a CPU the first
two; then each in turn gets the same load while the others are idle, on a CPU frozen by SIGSTOP, so that they
take none of it. First (`level`) a few programs that the memory holds, in pairs against stock vLLM. Then
(`live`) more live sessions than the KV cache holds, with an agent's programs. The stage `simulated` plays the
same sessions in the simulator, from the profile that was measured.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import torch
import yaml

from continuum_lmcache.errors import TraceError
from experiments import policies
from experiments.client import Client, ServerUnusable
from experiments.demo_servers import CONTINUUM, FCFS
from experiments.demo_servers import Contender as Offloading
from experiments.driver import Plan, TurnRecord, run, untold
from experiments.gpu.place import GB, Place
from experiments.mp_server import serve_mp
from experiments.replay import ORDINARY, SHARED_PREFIX_TOKENS, Job, replay_sessions
from experiments.selection import Selection
from experiments.server import ServerError, processes, serve
from experiments.sessions import capped, figures
from experiments.sim.serving import STOCK, Setup
from experiments.sim.step_time import Machine
from experiments.sim.trace_programs import FITTED, half
from experiments.workload import Program, growing, scaled

TRACE = "claude-code"
SEED = 3
SHARED_GPU = 0.92  # of the card's memory, for all servers that are up
START_S = 300.0  # four servers at once on an H200 whose disk was cold: 160 to 185 s
LEVEL_SESSIONS = (1, 4, 16)
PAIRS = 5
WARM_UP = (4, PAIRS)  # sessions, and the pair's number
PAIR_TOKENS = (1500, 250, 250, 250)  # new in each turn's prompt
PAIR_OUTPUTS = (100, 100, 100, 100)
PAIR_GAP_S = 0.05
WAKE_S = 0.5  # from a thaw to the first request
FIGURES = ("tokens_per_s", "goodput_10", "goodput_30", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "ttft_max_s")


@dataclass(frozen=True, slots=True)
class Contender:
    """One server."""

    order: str  # fcfs: stock vLLM; a policy of ours
    offloading: Offloading | None

    @property
    def label(self) -> str:
        return f"{self.order}{'+LMCache' if self.offloading else ''}"


CONTENDERS = (  # the most telling first: time may run out
    Contender("fcfs", None),
    Contender("continuum", None),
    Contender("continuum-published", None),
    Contender("fcfs", FCFS),
    Contender("continuum", CONTINUUM),
)


@dataclass(frozen=True, slots=True)
class Server:
    """A contender that answers."""

    who: Contender
    url: str
    frozen: Sequence[psutil.Process] = ()  # its processes, the front end first, where it is frozen when idle

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Within the block it runs."""
        self.thaw()
        time.sleep(WAKE_S if self.frozen else 0.0)
        try:
            yield
        finally:
            self.freeze()

    def freeze(self) -> None:
        for process in self.frozen:
            process.suspend()

    def thaw(self) -> None:
        for process in reversed(self.frozen):
            with suppress(psutil.NoSuchProcess):  # it died: the requests' error says more
                process.resume()


def pool(place: Place) -> tuple[Program, ...]:
    """The agent's programs of the report half, shrunk to the window; else the fitted ones."""
    window_tokens = place.window_tokens - SHARED_PREFIX_TOKENS
    try:
        programs = half(TRACE, "report", window_tokens)  # of those that would not shrink to less than a half
    except TraceError:
        programs = ()
    return capped(scaled(programs or half(TRACE, FITTED), window_tokens))


def selection(trace: Path, sessions: int) -> Selection:
    """The pool, with texts of its own for each number of sessions."""
    return Selection(SEED + sessions, trace=trace, jps=1.0)  # live sessions do not look at arrivals


def measured(
    place: Place,
    model: Path,
    profile: Path,
    out: Path,
    until_s: float,
    save: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Every contender's figures, until time runs out (`until_s` on time.monotonic).

    `save` gets all results after every run, so that a failing run loses none.
    """
    trace = written(pool(place), out / "programs.jsonl")
    found: dict[str, Any] = {"level": [], "rows": []}
    left_out: dict[str, str] = {}
    every = groups(place)
    for group in every:
        left_s = until_s - time.monotonic()
        if left_s < 60:
            left_out |= {who.label: "no time was left" for who in group}
            continue
        with ExitStack() as until:
            servers = []
            for who, came in started(group, place, model, profile, out, min(START_S, left_s), until):
                if isinstance(came, ServerError):
                    left_out[who.label] = str(came)
                else:
                    is_frozen = not place.on_gpu and len(group) > 1
                    servers.append(Server(who, came, processes(came) if is_frozen else ()))
                    until.callback(servers[-1].thaw)  # a frozen process does not handle SIGTERM
                    servers[-1].freeze()
            try:
                if group is every[0]:
                    for row in level(servers, place):
                        found["level"].append(row)
                        save(found)
            except ServerUnusable as error:
                left_out["level"] = str(error)
            for sessions in place.sessions:
                for server in servers:
                    with server.awake():
                        row = live(server, sessions, trace, place, out, until_s)
                    found["rows"].append(row)
                    save(found)
    failed = [f"{r['label']}, {r['sessions']} sessions: {r['why']}" for r in found["rows"] if "why" in r]
    failed += [f"{label} was left out: {why.splitlines()[0]}" for label, why in left_out.items()]
    return found | {"failed": "; ".join(failed)}


def level(servers: Sequence[Server], place: Place) -> Iterator[dict[str, Any]]:
    """Pairs of the first two servers, in turn (A B, B A, ...), with programs that no cache holds, and as many
    at once as the memory holds.

    The first pair warms up. Times a token and first tokens are in seconds.
    """
    if len(servers) < 2:
        return
    held = [n for n in LEVEL_SESSIONS if n * sum((*PAIR_TOKENS, *PAIR_OUTPUTS)) <= place.kv_tokens]
    for sessions, pair in (WARM_UP, *product(held, range(PAIRS))):
        turns = {}
        for side in servers[:2] if pair % 2 else servers[1::-1]:
            with side.awake():
                turns[side.who.label] = asyncio.run(together(side, pair, sessions))
        if (sessions, pair) != WARM_UP:
            yield {"sessions": sessions, "pair": pair, **{name: pace(of) for name, of in turns.items()}}


async def together(server: Server, pair: int, count: int) -> list[TurnRecord]:
    """Some programs at once. Raises ServerUnusable where a turn fails."""
    found: list[TurnRecord] = []
    plan = Plan("tiny", 1000 * count + pair, ORDINARY, identify=untold)
    async with Client(f"{server.url}/v1", 60) as client:
        await run(
            [growing(f"pair{count}-{pair}-{i}", PAIR_TOKENS, PAIR_OUTPUTS, PAIR_GAP_S) for i in range(count)],
            plan,
            client.complete,
            found.append,
        )
    if failed := [turn for turn in found if turn.error is not None]:
        raise ServerUnusable(f"{server.url}: {failed[0].program} failed: {failed[0].error}")
    return found


def pace(turns: Sequence[TurnRecord]) -> dict[str, float]:
    """Means: seconds a token after the first, until the first, and of later turns until the first."""
    done = [(t, t.t_first or 0.0, t.t_done or 0.0) for t in turns]
    return {
        "tpot_s": fmean((end - first) / (t.output_tokens - 1) for t, first, end in done),
        "first_ttft_s": fmean(first - t.t_sent for t, first, _ in done if t.turn == 1),
        "later_ttft_s": fmean(first - t.t_sent for t, first, _ in done if t.turn > 1),
    }


def live(
    server: Server, sessions: int, trace: Path, place: Place, out: Path, until_s: float
) -> dict[str, Any]:
    """The sessions' figures on one server; `why` where there are none."""
    label = server.who.label
    row: dict[str, Any] = {"label": label, "sessions": sessions, "warm_up_s": place.warm_up_s}
    counted_s = min(place.counted_s, until_s - time.monotonic() - place.warm_up_s)
    if counted_s < 30:
        return row | {"why": "no time was left"}
    job = Job(f"{server.url}/v1", f"{label}-{sessions}", selection(trace, sessions), out, identify=untold)
    try:
        found = replay_sessions(job, sessions, counted_s, place.warm_up_s)
    except ServerUnusable as error:
        return row | {"why": str(error)}
    row |= {"counted_s": counted_s, **found}
    return row | ({"why": f"{found['errors']} turns failed"} if found["errors"] else {})


def simulated(
    rows: Sequence[Mapping[str, Any]], place: Place, profile: Path, out: Path
) -> list[dict[str, Any]]:
    """The same sessions in the simulator, for every row with figures."""
    from experiments.sim.sessions import play

    machine = Machine.from_profile(yaml.safe_load(profile.read_text()), profile.name, place.kv_tokens)
    found = []
    for row in rows:
        if "why" in row:
            continue
        label, sessions, start_s = row["label"], row["sessions"], row["warm_up_s"]
        programs = selection(out / "programs.jsonl", sessions).programs(print)
        end_s = start_s + row["counted_s"]
        played = play(programs, setup(label, place, machine), sessions, SEED + sessions, end_s)
        found.append(
            {"label": label, "sessions": sessions, **figures(played.turns, sessions, start_s, end_s)}
        )
    return found


def setup(label: str, place: Place, machine: Machine) -> Setup:
    order, _, lmcache = label.partition("+")
    tiers = {
        "dram_gb": place.dram_gib,
        "ssd_gb": place.ssd_gb * GB / 2**30,
        "chunk_tokens": 256,
    }
    return Setup(
        policy=STOCK if order == "fcfs" else order,
        tiers=tiers if lmcache else None,
        machine=machine,
        step_tokens=place.step_tokens,
        max_seqs=place.max_seqs,
        block_tokens=place.block_tokens,
        shared_tokens=SHARED_PREFIX_TOKENS,
        async_scheduling=place.on_gpu,
        untold_ends=True,
    )


def written(found: Sequence[Program], path: Path) -> Path:
    """As a trace that Selection reads."""
    path.write_text("".join(json.dumps(asdict(p)) + "\n" for p in found))
    return path


def groups(place: Place) -> list[tuple[Contender, ...]]:
    """Contenders whose servers fit the memory together; on a CPU the first two, then one at a time."""
    if not place.on_gpu:
        return [CONTENDERS[:2], *((who,) for who in CONTENDERS[2:])]
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
    args = ["--scheduling-policy", scheduling, "--dtype", place.dtype]
    args += ["--max-model-len", str(place.window_tokens)]
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
        args += ["--kv-transfer-config", json.dumps(who.offloading.transfer_config(mp))]
    log = out / f"{who.label}-server.log"
    serving = serve(model, args, log=log, env=env, start_s=start_s, on_gpu=place.on_gpu)
    return until.enter_context(serving)
