"""Measures what continuum costs with ample memory, where it can gain nothing: against stock vLLM, in pairs.

    python -m experiments.no_pressure                  # without a KV connector
    python -m experiments.no_pressure --mp             # with LMCache's MP server behind each

Two servers, of which one is always frozen by SIGSTOP, so that it takes no CPU: vLLM without this package
and its fcfs, and `--scheduling-policy continuum`. Both serve the same programs in turns (A B, B A, A B,
...); each pair has programs of its own, which no prefix cache holds. Of each pair one ratio of mean job
times, tool gaps included; printed of all pairs is their mean, its standard error, and what these make of a
95 % interval. Turns of two lengths separate the extra cost of a turn from that of a token. Job times are
wall-clock times: for figures nothing else may run. The processes' CPU times need no quiet machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Annotated

import numpy as np
import psutil
import typer
from rich.console import Console
from rich.table import Table
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python PATH` as well as -m

from experiments.client import Client
from experiments.demo_report import machine
from experiments.demo_servers import ROOT
from experiments.driver import Plan, TurnRecord, run
from experiments.mp_server import serve_mp
from experiments.replay import ORDINARY
from experiments.server import ServerError, fast_dtype, processes, serve
from experiments.tiny_model import make_model
from experiments.workload import Program, TurnSpec

STOCK, OURS = "fcfs", "continuum"
ALONE = {"VLLM_PLUGINS": ""}  # vLLM without this package
WINDOW_TOKENS = 4096
TURNS, GAP_S = 6, 0.02
FIRST_TOKENS, NEW_TOKENS = 384, 64
OUTPUT_TOKENS = (8, 48)  # in turns
WAKE_S = 0.5  # from a thaw to the first request
# a frozen worker sends no heartbeat: after 120 s LMCache's server drops it, and a stock engine dies of that
KEEP_SILENT = ("--worker-reap-timeout-seconds", "0")


class ServersDiffer(Exception):
    """The two servers did not do the same work: their times cannot be compared."""


@dataclass
class Side:
    """One of the two servers, with all its processes."""

    name: str
    url: str
    processes: list[tuple[str, psutil.Process]]  # by kind, the front end first
    turns: list[list[TurnRecord]] = field(default_factory=list)  # by pair
    cpu_s: dict[str, float] = field(default_factory=dict)  # in all pairs

    def freeze(self) -> None:
        """No CPU for the server until `thaw`."""
        for _, process in self.processes:
            process.suspend()

    def thaw(self) -> None:
        for _, process in reversed(self.processes):
            with contextlib.suppress(psutil.NoSuchProcess):  # it died: the requests' error says more
                process.resume()

    def cpu_times_s(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for role, process in self.processes:
            times = process.cpu_times()
            found[role] = found.get(role, 0.0) + times.user + times.system
        return found

    def measure(self, programs: Sequence[Program], plan: Plan) -> None:
        """Thaw, serve the programs, freeze; the times are added to `turns` and `cpu_s`."""
        self.thaw()
        time.sleep(WAKE_S)
        before_s = self.cpu_times_s()
        self.turns.append(asyncio.run(replayed(self.url, programs, plan)))
        for role, used_s in self.cpu_times_s().items():
            self.cpu_s[role] = self.cpu_s.get(role, 0.0) + used_s - before_s[role]
        self.freeze()

    def counted(self, pattern: str) -> float:
        """The sum of the metrics whose line begins so. The server must be awake."""
        lines = asyncio.run(metrics(self.url)).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(pattern, line))


def role(process: psutil.Process, front: bool) -> str:
    """The role of a vLLM process, by its own name."""
    title = " ".join(process.cmdline())
    named = {"VLLM::EngineCore": "engine", "VLLM::Worker": "worker"}
    return "API server" if front else next((r for name, r in named.items() if name in title), "other")


async def metrics(url: str) -> str:
    async with Client(f"{url}/v1", 60) as client:
        return await client.metrics_text()


async def replayed(url: str, programs: Sequence[Program], plan: Plan) -> list[TurnRecord]:
    """The turns of all programs, one program after the other. Raises ServersDiffer if one fails."""
    found: list[TurnRecord] = []
    async with Client(f"{url}/v1", 120) as client:
        for program in programs:
            await run([program], plan, client.complete, found.append)
    if failed := [turn for turn in found if turn.error is not None]:
        raise ServersDiffer(f"{url}: {failed[0].program} turn {failed[0].turn} failed: {failed[0].error}")
    return found


def programs_of(pair: int, count: int) -> list[Program]:
    """Programs of a pair: of equal size, with tokens of their own (the driver draws them by name)."""
    found = []
    for number in range(count):
        turns: list[TurnSpec] = []
        context_tokens = 0
        for turn in range(TURNS):
            new_tokens = NEW_TOKENS if turn else FIRST_TOKENS
            output_tokens = OUTPUT_TOKENS[(turn + number) % 2]
            prompt_tokens = context_tokens + new_tokens
            gap_s = GAP_S if turn < TURNS - 1 else None
            turns.append(TurnSpec(prompt_tokens, new_tokens, output_tokens, "bash", "ls", gap_s))
            context_tokens = prompt_tokens + output_tokens
        found.append(Program(f"pair{pair}-{number}", 0.0, tuple(turns)))
    return found


@contextlib.contextmanager
def servers(model: Path, out: Path, mp: bool) -> Iterator[dict[str, Side]]:
    """Both servers; both are frozen."""
    with contextlib.ExitStack() as until:
        sides = {}
        for name in (STOCK, OURS):
            env = {} if name == OURS else ALONE
            args = ["--scheduling-policy", name, "--max-model-len", str(WINDOW_TOKENS)]
            args += ["--enable-prompt-tokens-details", "--dtype", fast_dtype()]
            behind: list[tuple[str, psutil.Process]] = []
            if mp:
                disk = Path(until.enter_context(tempfile.TemporaryDirectory(prefix="no-pressure-")))
                log = out / f"{name}-mp.log"
                store = until.enter_context(serve_mp(1.0, disk, log, *KEEP_SILENT, module=name == OURS))
                assert store.process is not None
                behind = [("lmcache server", psutil.Process(store.process.pid))]
                behind += [("lmcache server", p) for p in behind[0][1].children(recursive=True)]
                args += ["--kv-transfer-config", json.dumps(store.transfer_config)]
            url = until.enter_context(serve(model, args, log=out / f"{name}-server.log", env=env))
            found = processes(url)
            own = [(role(process, front=process is found[0]), process) for process in found]
            side = sides[name] = Side(name, url, own + behind)
            until.callback(side.thaw)  # a frozen process does not handle SIGTERM
            side.freeze()
        yield sides


def job_times_s(turns: Sequence[TurnRecord]) -> list[float]:
    """Of each program, from its first request to its last token."""
    by_program: dict[str, list[TurnRecord]] = {}
    for turn in turns:
        by_program.setdefault(turn.program, []).append(turn)
    return [ends(p)[1] - ends(p)[0] for p in by_program.values()]


def ratio(stock: Sequence[TurnRecord], ours: Sequence[TurnRecord]) -> float:
    """Of the mean job times, ours over stock's."""
    return mean(job_times_s(ours)) / mean(job_times_s(stock))


def ends(turns: Sequence[TurnRecord]) -> tuple[float, float]:
    done_s = turns[-1].t_done
    assert done_s is not None
    return turns[0].t_sent, done_s


def estimate(values: Sequence[float]) -> str:
    """Mean, standard error, and 95 % interval of the pairs' values."""
    middle = mean(values)
    if len(values) < 2:
        return f"{middle:.4f}"
    error = float(np.std(values, ddof=1)) / len(values) ** 0.5
    reach = float(stats.t.ppf(0.975, len(values) - 1)) * error
    return f"{middle:.4f} +- {error:.4f} (95 %: {middle - reach:.4f} to {middle + reach:.4f})"


def cpu_table(sides: dict[str, Side]) -> Table:
    """CPU time by process, per generated token."""
    table = Table("process", title="CPU ms per output token, and per turn")
    for name in sides:
        table.add_column(f"{name}, a token", justify="right")
        table.add_column("a turn", justify="right")
    for part in dict.fromkeys(r for side in sides.values() for r in side.cpu_s):
        row = []
        for side in sides.values():
            turns = [turn for pair in side.turns for turn in pair]
            used_ms = 1e3 * side.cpu_s.get(part, 0.0)
            row += [f"{used_ms / sum(t.output_tokens for t in turns):.3f}", f"{used_ms / len(turns):.2f}"]
        table.add_row(part, *row)
    return table


def report(sides: dict[str, Side], console: Console) -> None:
    """All figures of the pairs so far."""
    stock, ours = sides[STOCK], sides[OURS]
    pairs = list(zip(stock.turns, ours.turns, strict=True))
    ratios = [ratio(a, b) for a, b in pairs]
    console.print(f"pairs: {', '.join(f'{r:.4f}' for r in ratios)}")
    console.print(f"mean job time, {OURS} over {STOCK}: {estimate(ratios)}")
    console.print(cpu_table(sides))


def check(sides: dict[str, Side], console: Console) -> None:
    """Whether memory was ample on both sides, and the same tokens were computed."""
    computed: dict[str, int] = {}
    for side in sides.values():
        turns = [turn for pair in side.turns for turn in pair]
        computed[side.name] = sum(turn.prompt_tokens - (turn.cached_tokens or 0) for turn in turns)
        side.thaw()
        preempted = side.counted("vllm:num_preemptions_total")
        side.freeze()
        if preempted:
            raise ServersDiffer(f"{side.name}: memory was short ({preempted:.0f} preemptions)")
    console.print(f"prompt tokens computed: {computed}")


def main(
    mp: Annotated[bool, typer.Option(help="LMCache's MP server behind each.")] = False,
    pairs: Annotated[int, typer.Option(min=1, help="How many ratios.")] = 14,
    programs: Annotated[int, typer.Option(min=1, help=f"Of {TURNS} turns each, in a pair.")] = 16,
    out: Annotated[Path, typer.Option(help="Folder for the servers' logs.")] = ROOT / ".work" / "no-pressure",
) -> None:
    """Print the ratios, their summary, and CPU time by process."""
    console = Console(width=120)
    console.print(machine())
    model = make_model(ROOT / ".work" / "tiny-model")
    out.mkdir(parents=True, exist_ok=True)
    try:
        with servers(model, out, mp) as sides:
            for pair in range(pairs + 1):  # the first warms up
                plan = Plan("tiny", pair, ORDINARY)
                chosen = programs_of(pair, programs if pair else min(programs, 4))
                for name in (STOCK, OURS) if pair % 2 else (OURS, STOCK):
                    sides[name].measure(chosen, plan)
                if not pair:
                    for side in sides.values():
                        side.turns.clear()
                        side.cpu_s.clear()
                elif len(sides[STOCK].turns) > 1:
                    last = ratio(sides[STOCK].turns[-1], sides[OURS].turns[-1])
                    console.print(f"pair {pair} of {pairs}: {last:.4f}")
            report(sides, console)
            check(sides, console)
    except (ServerError, ServersDiffer) as error:
        raise SystemExit(f"no_pressure: {error}") from error


if __name__ == "__main__":
    typer.run(main)
