"""Measures what continuum costs with ample memory, where it can gain nothing: against stock vLLM, in pairs.

    python -m experiments.no_pressure                  # without a KV connector
    python -m experiments.no_pressure --mp             # with LMCache's MP server behind each

Two servers, of which one is always frozen by SIGSTOP, so that it takes no CPU: vLLM without this package
and its fcfs, and `--scheduling-policy continuum`. Both serve the same programs in turns (A B, B A, A B,
...); each pair has programs of its own, which no prefix cache holds. Of each pair two ratios, ours over
stock's: of the mean job times, tool gaps included, and of the CPU time of all processes. Printed of all
pairs is their mean, its standard error, and what these make of a 95 % interval. Job times are wall-clock
times: for figures nothing else may run. CPU times need no quiet machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated

import psutil
import typer
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python PATH` as well as -m

from experiments.client import Client
from experiments.demo_servers import ROOT
from experiments.driver import Plan, TurnRecord, run
from experiments.mp_server import serve_mp
from experiments.replay import ORDINARY
from experiments.server import ServerError, fast_dtype, processes, serve
from experiments.sweep.conditions import machine
from experiments.tiny_model import make_model
from experiments.workload import Program, growing

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
    """A turn failed: the servers' times cannot be compared."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two servers, with all its processes, the front end first."""

    url: str
    processes: list[psutil.Process]

    def freeze(self) -> None:
        """No CPU for the server until `thaw`."""
        for process in self.processes:
            process.suspend()

    def thaw(self) -> None:
        for process in reversed(self.processes):
            with contextlib.suppress(psutil.NoSuchProcess):  # it died: the requests' error says more
                process.resume()

    def cpu_s(self) -> float:
        times = [process.cpu_times() for process in self.processes]
        return sum(spent.user + spent.system for spent in times)

    def measure(self, programs: Sequence[Program], plan: Plan) -> tuple[float, float]:
        """Thaw, serve the programs, freeze; the mean job time and the CPU time, in seconds."""
        self.thaw()
        time.sleep(WAKE_S)
        before_s = self.cpu_s()
        job_s = asyncio.run(mean_job_s(self.url, programs, plan))
        used_s = self.cpu_s() - before_s
        self.freeze()
        return job_s, used_s


async def mean_job_s(url: str, programs: Sequence[Program], plan: Plan) -> float:
    """From a program's first request to its last token, one after the other. Raises ServersDiffer."""
    turns: list[TurnRecord] = []
    async with Client(f"{url}/v1", 120) as client:
        for program in programs:
            await run([program], plan, client.complete, turns.append)
    if failed := [turn for turn in turns if turn.error is not None]:
        raise ServersDiffer(f"{url}: {failed[0].program} turn {failed[0].turn} failed: {failed[0].error}")
    jobs = [list(job) for _, job in groupby(turns, lambda turn: turn.program)]
    return mean((job[-1].t_done or 0.0) - job[0].t_sent for job in jobs)


def programs_of(pair: int, count: int) -> list[Program]:
    """Programs of a pair: of equal size, with tokens of their own (the driver draws them by name)."""
    new_tokens = (FIRST_TOKENS, *[NEW_TOKENS] * (TURNS - 1))
    outputs = [[OUTPUT_TOKENS[(turn + number) % 2] for turn in range(TURNS)] for number in range(count)]
    return [growing(f"pair{pair}-{number}", new_tokens, of, GAP_S) for number, of in enumerate(outputs)]


@contextlib.contextmanager
def servers(model: Path, out: Path, mp: bool) -> Iterator[dict[str, Side]]:
    """Both servers, frozen."""
    with contextlib.ExitStack() as until:
        sides = {}
        for name in (STOCK, OURS):
            args = ["--scheduling-policy", name, "--max-model-len", str(WINDOW_TOKENS)]
            args += ["--dtype", fast_dtype()]
            behind: list[psutil.Process] = []
            if mp:
                disk = Path(until.enter_context(tempfile.TemporaryDirectory(prefix="no-pressure-")))
                log = out / f"{name}-mp.log"
                store = until.enter_context(serve_mp(1.0, disk, log, *KEEP_SILENT, module=name == OURS))
                assert store.process is not None
                own = psutil.Process(store.process.pid)
                behind = [own, *own.children(recursive=True)]
                args += ["--kv-transfer-config", json.dumps(store.transfer_config)]
            env = {} if name == OURS else ALONE
            url = until.enter_context(serve(model, args, log=out / f"{name}-server.log", env=env))
            side = sides[name] = Side(url, processes(url) + behind)
            until.callback(side.thaw)  # a frozen process does not handle SIGTERM
            side.freeze()
        yield sides


def estimate(values: Sequence[float]) -> str:
    """Mean, standard error, and 95 % interval of the pairs' values."""
    middle = mean(values)
    if len(values) < 2:
        return f"{middle:.4f}"
    error = stdev(values) / len(values) ** 0.5
    reach = float(stats.t.ppf(0.975, len(values) - 1)) * error
    return f"{middle:.4f} +- {error:.4f} (95 %: {middle - reach:.4f} to {middle + reach:.4f})"


def main(
    mp: Annotated[bool, typer.Option(help="LMCache's MP server behind each.")] = False,
    pairs: Annotated[int, typer.Option(min=1, help="How many ratios.")] = 14,
    programs: Annotated[int, typer.Option(min=1, help=f"Of {TURNS} turns each, in a pair.")] = 16,
    out: Annotated[Path, typer.Option(help="Folder for the servers' logs.")] = ROOT / ".work" / "no-pressure",
) -> None:
    """Print each pair's ratios as it ends, then their summary."""
    print(machine())
    out.mkdir(parents=True, exist_ok=True)
    ratios: list[tuple[float, float]] = []
    try:
        with servers(make_model(ROOT / ".work" / "tiny-model"), out, mp) as sides:
            for pair in range(pairs + 1):  # the first warms up
                plan, chosen = Plan("tiny", pair, ORDINARY), programs_of(pair, programs if pair else 4)
                order = (STOCK, OURS) if pair % 2 else (OURS, STOCK)
                found = {name: sides[name].measure(chosen, plan) for name in order}
                if pair:
                    job, cpu = (ours / stock for stock, ours in zip(found[STOCK], found[OURS], strict=True))
                    ratios.append((job, cpu))
                    print(f"pair {pair} of {pairs}: job time {job:.4f}, CPU time {cpu:.4f}", flush=True)
    except (ServerError, ServersDiffer) as error:
        raise SystemExit(f"no_pressure: {error}") from error
    for what, values in zip(("mean job time", "CPU time"), zip(*ratios, strict=True), strict=True):
        print(f"{what}, {OURS} over {STOCK}: {estimate(values)}")


if __name__ == "__main__":
    typer.run(main)
