"""Do loads pay on a live server, is what does not pay left undone, and does PrefillReload come true?

    python -m experiments.live_reload paired        a slow disk and a fast DRAM, against no LMCache at all
    python -m experiments.live_reload rates         the same DRAM at two rates: what becomes of the TTL
    python -m experiments.live_reload forecasts     several programs at once, DRAM and disk too small

Real `vllm serve`s of the small model on this machine. In `paired` and `rates` all servers are up at
the same time and get the same visit one after the other, so that a machine that has slow moments has
them for all. A visit is the next turn of one of a few programs, whose contexts together are several
times the GPU's KV cache: each context has left the GPU when its program comes back. Tiers are made slow by
experiments.throttled. Computing is slow here (12 MB/s of KV), so a slow disk is slower still.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import httpx
import numpy as np
import typer
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python PATH` as well as -m

from continuum_lmcache.gaps import Gaps
from continuum_lmcache.records.measures import percentile
from continuum_lmcache.records.recordings import load
from continuum_lmcache.vllm_plugin.gaps_file import save_gaps
from experiments.analyze import reload_table, titled
from experiments.client import Client, request_body
from experiments.driver import Plan, run
from experiments.server import serve
from experiments.tiny_model import make_model
from experiments.workload import Program, TurnSpec

ROOT = Path(__file__).parents[1]
PROFILE = ROOT / "profiles" / "cpu-tiny.yaml"
BLOCKS, WINDOW_TOKENS = 44, 4096  # blocks of 128 tokens: one context and a half
SIZES = ("--max-model-len", str(WINDOW_TOKENS), "--num-gpu-blocks-override", str(BLOCKS))
PROGRAMS = 6  # in turn, in `paired` and `rates`
FIRST_TOKENS, NEW_TOKENS = 1500, 64
TOOL = "wait"
VOCABULARY = range(300, 4000)
DRAM_ONLY = {"lmcache.max_local_cpu_size": 1.0}
SLOW_GBPS = 0.004  # a third of what computing brings

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


@dataclass(frozen=True, slots=True)
class Contender:
    """One server."""

    name: str
    lmcache: Mapping[str, Any] | None  # settings; None: no LMCache
    disk: bool = False
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """Of its log and recording."""
        return re.sub(r"[^\w.]+", "-", self.name)


def up(contender: Contender, out: Path, until: ExitStack, policy: str) -> str:
    """Start the contender's server; its URL."""
    folder = out / contender.folder
    folder.mkdir(parents=True, exist_ok=True)
    extra: dict[str, Any] = dict(contender.lmcache or {})
    if contender.disk:
        place = until.enter_context(tempfile.TemporaryDirectory(prefix="disk-", dir=out))
        extra |= {
            "lmcache.local_disk": f"file://{Path(place).resolve()}/",
            "lmcache.max_local_disk_size": 2.0,
        }
    connector = {"kv_connector": "ThrottledConnector", "kv_connector_module_path": "experiments.throttled"}
    config = connector | {"kv_role": "kv_both", "kv_connector_extra_config": extra}
    args = [*SIZES, "--scheduling-policy", "continuum"]
    if contender.lmcache is not None:
        args += ["--kv-transfer-config", json.dumps(config)]
    ours = {
        "CONTINUUM_POLICY": policy,
        "CONTINUUM_PROFILE": str(PROFILE),
        "CONTINUUM_RUN_OUTPUT_DIR": str(folder.resolve()),
    }
    model = make_model(ROOT / ".work" / "tiny-model")
    return until.enter_context(
        serve(model, args, log=folder / "server.log", env=ours | dict(contender.environ))
    )


async def visits(urls: Mapping[str, str], count: int, seed: int) -> dict[str, list[float]]:
    """Seconds to the first token of each visit, by contender. First visits of a program are left out."""
    draw = np.random.default_rng(seed)
    prompts = [
        draw.integers(VOCABULARY.start, VOCABULARY.stop, FIRST_TOKENS).tolist() for _ in range(PROGRAMS)
    ]
    took_s: dict[str, list[float]] = {name: [] for name in urls}
    loop = asyncio.get_running_loop()
    async with ClientsOf(urls) as clients:
        for visit in range(PROGRAMS + count):
            which = visit % PROGRAMS
            prompts[which] += draw.integers(VOCABULARY.start, VOCABULARY.stop, NEW_TOKENS).tolist()
            body = request_body("tiny", prompts[which], 1) | {"job_id": f"p{which}", "this_func_call": TOOL}
            # whoever goes first finds the machine in another state: take turns
            order = sorted(urls, key=lambda name: (list(urls).index(name) + visit) % len(urls))
            for name in order:
                sent_s = loop.time()
                answer = await clients[name].complete(body)
                if visit >= PROGRAMS:
                    took_s[name].append(answer.first_s - sent_s)
    return took_s


class ClientsOf:
    """A client for each server."""

    def __init__(self, urls: Mapping[str, str]) -> None:
        self._clients = {name: Client(f"{url}/v1", timeout_s=120) for name, url in urls.items()}

    async def __aenter__(self) -> dict[str, Client]:
        for client in self._clients.values():
            await client.__aenter__()
        return self._clients

    async def __aexit__(self, *_: object) -> None:
        for client in self._clients.values():
            await client.__aexit__()


def counted(url: str, name: str) -> dict[str, float]:
    """A metric of ours by its label's value."""
    lines = re.findall(rf"^{name}{{(.*?)}} (\S+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    return {
        next(iter(re.findall(r'(?:decision|rate|tier)="(.*?)"', labels)), ""): float(n) for labels, n in lines
    }


@app.command()
def paired(
    count: Annotated[int, typer.Option(help="visits, after each program's first")] = 42,
    repeats: Annotated[int, typer.Option(help="with other prompts, on the same servers")] = 3,
    always: Annotated[bool, typer.Option(help="also: the slow disk without the decision")] = False,
    out: Annotated[Path, typer.Option()] = Path("live-reload"),
) -> None:
    """Time to first token: no LMCache, a disk at a third of the recompute rate, DRAM at full speed."""
    slow = {"THROTTLE_SSD_GBPS": str(SLOW_GBPS)}
    disk_only = {**DRAM_ONLY, "lmcache.local_cpu": False}
    contenders = [
        Contender("no LMCache", None),
        Contender("slow disk", disk_only, True, slow),
        Contender("DRAM", DRAM_ONLY),
    ]
    if always:
        never = {**slow, "CONTINUUM_LOAD_OR_RECOMPUTE": "false"}
        contenders.append(Contender("slow disk, always load", disk_only, True, never))
    with ExitStack() as until:
        urls = {each.name: up(each, out, until, "program-fcfs") for each in contenders}
        table = titled("Seconds to first token", "repeat", *urls, *(f"{n} / none" for n in list(urls)[1:]))
        for seed in range(repeats):
            table.add_row(str(seed + 1), *cells(asyncio.run(visits(urls, count, seed)), "no LMCache"))
            Console().print(table)  # each repeat takes minutes; what is there is there
        for name, url in urls.items():
            told = [counted(url, f"continuum_{what}") for what in ("load_decisions_total", "rate_samples")]
            print(name, *told, counted(url, "continuum_tier_bytes_per_second"))


def cells(took_s: Mapping[str, Sequence[float]], base: str) -> list[str]:
    """Median and mean of each, and the ratios of both to the base, visit by visit for the median."""
    plain = [f"{median(s):.3f} ({sum(s) / len(s):.3f})" for s in took_s.values()]
    others = [name for name in took_s if name != base]
    ratios = [
        (
            median(a / b for a, b in zip(took_s[name], took_s[base], strict=True)),
            sum(took_s[name]) / sum(took_s[base]),
        )
        for name in others
    ]
    return [*plain, *(f"{middle:.3f} ({mean:.3f})" for middle, mean in ratios)]


@app.command()
def rates(
    fast_gbps: Annotated[float, typer.Option()] = 1.0,
    slower: Annotated[float, typer.Option(help="times")] = 10.0,
    count: Annotated[int, typer.Option(help="visits, each a load")] = 50,
    out: Annotated[Path, typer.Option()] = Path("live-rates"),
) -> None:
    """The TTL of one tool, whose gaps are known, with DRAM at two rates; the profile is the same."""
    out.mkdir(parents=True, exist_ok=True)
    known = Gaps()
    for gap_s in np.geomspace(0.01, 2.0, 400):
        known.observe((TOOL,), float(gap_s))
    contenders = []
    for gbps in (fast_gbps, fast_gbps / slower):
        gaps = out / f"gaps-{gbps:g}.json"
        save_gaps(gaps, known)
        environ = {"THROTTLE_DRAM_GBPS": str(gbps), "CONTINUUM_GAPS_FILE": str(gaps.resolve())}
        contenders.append(Contender(f"{gbps:g} GB/s", DRAM_ONLY, environ=environ))
    with ExitStack() as until:
        urls = {each.name: up(each, out, until, "continuum") for each in contenders}
        asyncio.run(visits(urls, count, 0))
        measured = {name: counted(url, "continuum_tier_bytes_per_second") for name, url in urls.items()}
    table = titled(
        "TTL by DRAM rate", "throttled to", "rate learned", "PrefillReload", "TTL: first 10", "last 10"
    )
    for name, found in measured.items():
        turns = [t for t in load(out / Contender(name, None).folder).turns if t.retention and t.reload]
        ttls_s = [turn.retention["ttl_s"] for turn in turns if turn.retention]
        reload_s = median(t.retention["reload_s"] for t in turns[-10:] if t.retention)
        ends = (f"{median(part):.4f}" for part in (ttls_s[:10], ttls_s[-10:]))
        table.add_row(name, f"{found['dram'] / 1e9:.3f} GB/s", f"{reload_s:.3f}", *ends)
    Console().print(table)


def crowd(programs: int, turns: int, seed: int) -> list[Program]:
    """Programs that grow by about 200 tokens a turn, with tools of 0.2 to 2 s."""
    draw = np.random.default_rng(seed)
    made = []
    for number in range(programs):
        lengths = np.cumsum([draw.integers(900, 1500), *draw.integers(100, 300, turns - 1)])
        specs = [TurnSpec(int(lengths[0]), int(lengths[0]), 8, "Bash", TOOL, float(draw.uniform(0.2, 2)))]
        for before, now in pairwise(lengths):
            new = max(16, int(now - before) - 8)
            gap_s = float(draw.uniform(0.2, 2))
            specs.append(TurnSpec(specs[-1].context_tokens + new, new, 8, "Bash", TOOL, gap_s))
        made.append(Program(f"c{number}", number * 0.5, tuple(specs)))
    return made


@app.command()
def forecasts(
    programs: Annotated[int, typer.Option()] = 8,
    turns: Annotated[int, typer.Option()] = 12,
    dram_gib: Annotated[float, typer.Option()] = 0.06,
    seed: Annotated[int, typer.Option()] = 0,
    policy: Annotated[str, typer.Option()] = "continuum",
    out: Annotated[Path, typer.Option()] = Path("live-forecasts"),
) -> None:
    """PrefillReload as foretold at each finish, against what the return took: relative errors."""
    made = crowd(programs, turns, seed)
    tiers = {"lmcache.max_local_cpu_size": dram_gib, "lmcache.chunk_size": 128}
    with ExitStack() as until:
        url = up(Contender("crowd", tiers, True), out, until, policy)

        async def play() -> list[float]:
            took_s: list[float] = []
            async with Client(f"{url}/v1", timeout_s=300) as client:
                plan = Plan("tiny", seed, VOCABULARY)
                await run(
                    made, plan, client.complete, lambda turn: took_s.append((turn.t_first or 0) - turn.t_sent)
                )
            return took_s

        ttft_s = asyncio.run(play())
        told = [counted(url, f"continuum_{name}") for name in ("load_decisions_total", "rate_samples")]
    recorded = load(out / "crowd")
    Console().print(reload_table(recorded))
    print(f"TTFT, median: {percentile(ttft_s, 50):.3f} s;", *told)


if __name__ == "__main__":
    app()
