"""N live sessions of real agents, live, on one card; and what `continuum` costs where it can gain nothing.

Every contender is a separate server. As many as fit into the GPU's memory start together, on a CPU the first
two; then each in turn gets the same load while the others are idle, on a CPU frozen by SIGSTOP, so that they
take none of it. `level`: a few programs that the memory holds, in pairs against stock vLLM. `measured`: more
live sessions than the KV cache holds, with an agent's programs. What an earlier run measured is kept.
`simulated` plays the same sessions in the simulator, from the profile that was measured.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
import yaml

from continuum_lmcache.errors import TraceError
from experiments import policies
from experiments.client import Client, ServerUnusable
from experiments.demo_servers import CONTINUUM, FCFS
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
LEAST_COUNTED_S = 30.0
NO_TIME = "no time was left"
FIGURES = (
    *("tokens_per_s", "goodput_10", "goodput_30", "ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s"),
    *("ttft_max_s", "in_time_share", "sessions_in_time_share", "interactivity_p90"),
)


Save = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Bench:
    """Where and how long servers are measured."""

    place: Place
    model: Path
    profile: Path
    out: Path
    until_s: float  # on time.monotonic

    @property
    def left_s(self) -> float:
        return self.until_s - time.monotonic()


@dataclass(frozen=True, slots=True)
class Contender:
    """One server."""

    order: str  # fcfs: stock vLLM; a policy of ours
    tier: str = ""  # below the GPU

    @property
    def label(self) -> str:
        return f"{self.order}{self.tier and '+'}{self.tier}"


LMCACHE, NATIVE = "LMCache", "native"  # LMCache's server; vLLM's own offloading
CONTENDERS = (  # the most telling first: time may run out
    Contender("fcfs"),
    Contender("continuum"),
    Contender("continuum-published"),
    Contender("fcfs", LMCACHE),
    Contender("continuum", LMCACHE),
    Contender("fcfs", NATIVE),
    Contender("continuum", NATIVE),
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


def measured(bench: Bench, save: Save, earlier: Mapping[str, Any]) -> dict[str, Any]:
    """Every contender's sessions, until time runs out.

    `save` gets all results after every run, so that a failing run loses none. What `earlier` has is kept.
    """
    trace = written(pool(bench.place), bench.out / "programs.jsonl")
    rows = [row for row in earlier.get("rows", ()) if "why" not in row]
    done = {(row["label"], row["sessions"]) for row in rows}
    for sessions in bench.place.sessions:
        for group in groups(bench.place, sessions, done):
            with serving(group, bench) as (servers, lacking):
                rows += [{"label": who, "sessions": sessions, "why": why} for who, why in lacking.items()]
                for server in servers:
                    with server.awake():
                        rows.append(live(server, sessions, trace, bench))
                    save({"rows": rows})
    failed = [f"{r['label']}, {r['sessions']} sessions: {r['why']}" for r in rows if "why" in r]
    return {"rows": rows, "failed": "; ".join(failed)}


def level(bench: Bench, save: Save, earlier: Mapping[str, Any]) -> dict[str, Any]:
    """Pairs of the first two contenders, in turn (A B, B A, ...), with programs that no cache holds, and as
    many at once as the memory holds. Arguments as of `measured`. The first pair warms up. Times: seconds."""
    rows = [*earlier.get("rows", ())]
    held = [n for n in LEVEL_SESSIONS if n * sum((*PAIR_TOKENS, *PAIR_OUTPUTS)) <= bench.place.kv_tokens]
    done = {(row["sessions"], row["pair"]) for row in rows}
    wanted = [each for each in product(held, range(PAIRS)) if each not in done]
    with serving(CONTENDERS[:2], bench) as (servers, lacking):
        for sessions, pair in (WARM_UP, *wanted):
            if lacking or bench.left_s < 0:
                break
            turns = {}
            for side in servers if pair % 2 else servers[::-1]:
                with side.awake():
                    turns[side.who.label] = asyncio.run(together(side, pair, sessions))
            if (sessions, pair) != WARM_UP:
                rows.append(
                    {"sessions": sessions, "pair": pair} | {who: pace(of) for who, of in turns.items()}
                )
                save({"rows": rows})
    missing = len(held) * PAIRS - len(rows)
    failed = [f"{label}: {why}" for label, why in lacking.items()]
    return {"rows": rows, "failed": "; ".join(failed or [f"{missing} pairs are missing"] * bool(missing))}


@contextmanager
def serving(group: Sequence[Contender], bench: Bench) -> Iterator[tuple[Sequence[Server], Mapping[str, str]]]:
    """A group's servers, started together, each idle; and by label why one is not up."""
    with ExitStack() as until:
        servers, lacking = [], {}
        for who, came in started(group, bench, until):
            if isinstance(came, ServerError):
                lacking[who.label] = str(came).splitlines()[0]
                continue
            is_frozen = not bench.place.on_gpu and len(group) > 1
            servers.append(Server(who, came, processes(came) if is_frozen else ()))
            until.callback(servers[-1].thaw)  # a frozen process does not handle SIGTERM
            servers[-1].freeze()
        yield servers, lacking


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


def live(server: Server, sessions: int, trace: Path, bench: Bench) -> dict[str, Any]:
    """The sessions' figures on one server; `why` where there are none."""
    row: dict[str, Any] = {"label": server.who.label, "sessions": sessions}
    warm_up_s = bench.place.warm_up_s
    counted_s = min(bench.place.counted_s, bench.left_s - warm_up_s)
    if counted_s < LEAST_COUNTED_S:
        return row | {"why": NO_TIME}
    name = f"{server.who.label}-{sessions}"
    job = Job(f"{server.url}/v1", name, selection(trace, sessions), bench.out, identify=untold)
    try:
        found = replay_sessions(job, sessions, counted_s, warm_up_s)
    except ServerUnusable as error:
        return row | {"why": str(error)}
    row |= {"warm_up_s": warm_up_s, "counted_s": counted_s, **found}
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
        of_label = setup(label, place, machine)
        played = play(programs, of_label, sessions, SEED + sessions, end_s, warm_up_turns=0)
        found.append(
            {"label": label, "sessions": sessions, **figures(played.turns, sessions, start_s, end_s)}
        )
    return found


def setup(label: str, place: Place, machine: Machine) -> Setup:
    order, _, tier = label.partition("+")
    ssd_gib = place.ssd_gb * GB / 2**30 if tier == LMCACHE else 0.0
    tiers = {"dram_gb": place.dram_gib, "ssd_gb": ssd_gib, "chunk_tokens": 256}
    return Setup(
        policy=STOCK if order == "fcfs" else order,
        tiers=tiers if tier else None,
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


def groups(place: Place, sessions: int, done: Collection[tuple[str, int]]) -> list[tuple[Contender, ...]]:
    """Those without a row that start together: of one tier, as many as fit the GPU's memory; on a CPU the
    first two, then one at a time. vLLM refuses its own offloading on a CPU."""
    able = CONTENDERS if place.on_gpu else [who for who in CONTENDERS if who.tier != NATIVE]
    left = [who for who in able if (who.label, sessions) not in done]
    if place.on_gpu:
        total_gb = torch.cuda.get_device_properties(0).total_memory / GB
        at_once = max(1, int(SHARED_GPU * total_gb / place.server_gb()))
        of_tiers = [tuple(who for who in left if who.tier == tier) for tier in ("", LMCACHE, NATIVE)]
        return [of[at : at + at_once] for of in of_tiers for at in range(0, len(of), at_once)]
    pair = tuple(who for who in left if who in CONTENDERS[:2])
    return [*filter(None, [pair]), *((who,) for who in left[len(pair) :])]


def started(
    group: Sequence[Contender], bench: Bench, until: ExitStack
) -> Iterator[tuple[Contender, str | ServerError]]:
    """All servers of a group, started together; the URL, or why there is none. `until` ends each that began,
    whatever interrupts."""
    start_s = min(START_S, bench.left_s - bench.place.warm_up_s - LEAST_COUNTED_S)

    def start(who: Contender, own: ExitStack) -> str | ServerError:
        try:
            return up(who, bench, start_s, own)
        except ServerError as error:
            own.close()
            return error

    if start_s < 0:
        yield from ((who, ServerError(NO_TIME)) for who in group)
        return
    each = [until.enter_context(ExitStack()) for _ in group]
    with ThreadPoolExecutor(len(group)) as pool:
        found = list(pool.map(start, group, each))
    yield from zip(group, found, strict=True)


def up(who: Contender, bench: Bench, start_s: float, until: ExitStack) -> str:
    """Start LMCache's server if there is one, and vLLM's; the URL. Raises ServerError."""
    place, out = bench.place, bench.out
    scheduling = "fcfs" if who.order == "fcfs" else "continuum"
    args = ["--scheduling-policy", scheduling, "--dtype", place.dtype, "--enable-prompt-tokens-details"]
    args += ["--max-model-len", str(place.window_tokens)]
    args += ["--num-gpu-blocks-override", str(place.gpu_blocks), "--max-num-seqs", str(place.max_seqs)]
    args += ["--max-num-batched-tokens", str(place.step_tokens)]
    args += ["--load-format", "dummy"] if place.dummy_weights else []
    if place.on_gpu:
        total_gb = torch.cuda.get_device_properties(0).total_memory / GB
        args += ["--gpu-memory-utilization", f"{min(0.9, place.server_gb() / total_gb):.3f}"]
        # The size is given: servers that start together would each count the others' weights as their own.
        args += ["--kv-cache-memory-bytes", str(place.kv_bytes)]
    env = {"CONTINUUM_PROFILE": str(bench.profile.resolve())}
    if scheduling == "continuum":
        env["CONTINUUM_POLICY"] = policies.setting(who.order)
    if who.tier == NATIVE:
        args += ["--kv-offloading-size", f"{place.dram_gib:.3f}"]
    if who.tier == LMCACHE:
        offloading = FCFS if who.order == "fcfs" else CONTINUUM
        folder = TemporaryDirectory(dir=out, prefix=f"disk-{who.label}-", ignore_cleanup_errors=True)
        disk, log = Path(until.enter_context(folder)).resolve(), out / f"{who.label}-lmcache.log"
        ours = offloading.is_ours
        mp = until.enter_context(serve_mp(place.dram_gib, disk, log, module=ours, disk_gb=place.ssd_gb))
        args += ["--kv-transfer-config", json.dumps(offloading.transfer_config(mp))]
    log = out / f"{who.label}-server.log"
    serving = serve(bench.model, args, log=log, env=env, start_s=start_s, on_gpu=place.on_gpu)
    return until.enter_context(serving)
