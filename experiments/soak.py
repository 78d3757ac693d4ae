"""Checks that nothing grows: the programs of two hours on one live server, with shortened tools.

    python -m experiments.soak --minutes 6

A real `vllm serve` with `--scheduling-policy continuum`, LMCache with DRAM and disk, a
recorder and a file of learned gaps that is full from the start. Agents of 3 to 9 turns, 16 at a time;
one in eight never returns and one in eight disconnects in the middle of an answer. Every two seconds:
resident memory and open files of every process of the server, the program table, pinned blocks, and
how many gaps the CDF windows hold. Table 1's agents at 0.05 a second are 360 programs in two hours.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import httpx
import psutil
import typer
from prometheus_client.parser import text_string_to_metric_families

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python PATH` as well as -m

from continuum_lmcache.tools.durations import WINDOW, ToolDurations
from continuum_lmcache.tools.shell_key import levels
from experiments.client import Client, TurnFailed, request_body
from experiments.server import processes, serve
from experiments.soak_report import Sample, report
from experiments.tiny_model import make_model

ROOT = Path(__file__).parents[1]
ARGS = ("--max-model-len", "2048", "--num-gpu-blocks-override", "64", "--scheduling-policy", "continuum")
AT_ONCE = 16
EVERY_S = 2.0
TOOLS = ("bash pytest", "bash ls", "bash grep", "Read", "Edit", "WebFetch", *(f"rare-{i}" for i in range(10)))
LIKELY = (*[10] * 6, *[1] * 10)
GAP_S = 0.4  # the mean; real tools take longer and nothing of the server depends on it
ENV = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32"}  # by default it keeps code for the last 1,024 prompt lengths
IDLE_S = 20.0  # then a program is forgotten: an hour, shortened like the gaps


@dataclass(slots=True)
class Agents:
    """An endless stream of programs, and their results."""

    client: Client
    end_s: float
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    programs: int = 0
    turns: int = 0
    failed: int = 0

    async def live(self) -> None:
        """One of AT_ONCE clients: one program after the other."""
        while time.monotonic() < self.end_s:
            self.programs += 1
            await self.program(f"soak-{self.programs}", self.draw.randrange(8))

    async def program(self, name: str, fate: int) -> None:
        """`fate` 0: it stops without a word; 1: it disconnects in its last turn; else it reports its end."""
        history, turns = self.tokens(300), self.draw.randint(3, 9)
        for number in range(1, turns + 1):
            last = number == turns
            (tool,) = self.draw.choices(TOOLS, LIKELY)
            body = request_body("tiny", history, 12)
            body |= {"job_id": name, "this_func_call": tool, "is_last_step": last and fate > 1}
            try:
                async with asyncio.timeout(0.1 if last and fate == 1 else None):
                    answer = await self.client.complete(body)
            except TimeoutError:
                return
            except TurnFailed:
                self.failed += 1
                return
            self.turns += 1
            history = [*history, *answer.token_ids, *self.tokens(60)]
            await asyncio.sleep(self.draw.expovariate(1 / GAP_S))

    def tokens(self, count: int) -> list[int]:
        return [self.draw.randrange(300, 4000) for _ in range(count)]


def sampler(url: str, gaps: Path, agents: Agents) -> Callable[[], Sample]:
    """The function to call every EVERY_S."""
    found, start_s = processes(url), time.monotonic()
    (engine,) = [p for p in found if "EngineCore" in " ".join(p.cmdline())]
    names = {p.pid: "engine" if p == engine else role(p) for p in found}

    def sample() -> Sample:
        engine.send_signal(signal.SIGUSR1)  # writes the file of gaps, for the next sample
        metrics = totals(httpx.get(f"{url}/metrics", timeout=30).text)
        mib: dict[str, float] = {}
        files: dict[str, int] = {}
        for process in filter(psutil.Process.is_running, found):
            name = names[process.pid]
            mib[name] = mib.get(name, 0.0) + process.memory_info().rss / 2**20
            files[name] = files.get(name, 0) + process.num_fds()
        return Sample(
            time.monotonic() - start_s,
            mib,
            files,
            metrics.get("continuum_programs", 0.0),
            metrics.get("continuum_pinned_blocks", 0.0),
            held_gaps(gaps),
            agents.programs,
            agents.turns,
        )

    return sample


def role(process: psutil.Process) -> str:
    command = " ".join(process.cmdline())
    return "worker" if "Worker" in command else "API server" if "serve" in command else "helpers"


def totals(text: str) -> dict[str, float]:
    """Every metric's sum over its labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            found[one.name] = found.get(one.name, 0.0) + one.value
    return found


def held_gaps(path: Path) -> int:
    """Observations in all CDF windows, as last saved."""
    if not path.exists():
        return 0
    return sum(len(key["gaps_s"]) for key in json.loads(path.read_text())["keys"])


async def soak(url: str, out: Path, minutes: float) -> tuple[list[Sample], Agents]:
    samples: list[Sample] = []
    async with Client(f"{url}/v1", timeout_s=300) as client:
        agents = Agents(client, time.monotonic() + minutes * 60)
        take = sampler(url, out / "gaps.json", agents)
        places = asyncio.gather(*(agents.live() for _ in range(AT_ONCE)))
        while not places.done():
            samples.append(await asyncio.to_thread(take))
            await asyncio.wait([places], timeout=EVERY_S)
        await places
    return samples, agents


def weeks_of_gaps() -> str:
    """A file of gaps as after a long run: every tool's window is full."""
    gaps, draw = ToolDurations(), random.Random(1)
    for tool in TOOLS:
        for _ in range(WINDOW):
            gaps.observe(levels(tool), draw.expovariate(1 / GAP_S))
    return gaps.dumps()


def main(
    minutes: Annotated[float, typer.Option(help="of load")] = 6.0,
    out: Annotated[Path, typer.Option(help="folder of the server's files and log")] = Path(".work/soak"),
    docs: Annotated[Path, typer.Option(help="folder of soak.md and soak.png")] = ROOT
    / "experiments"
    / "records",
) -> None:
    """Run and report."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "gaps.json").write_text(weeks_of_gaps())
    extra = {
        "lmcache.max_local_cpu_size": 0.125,
        "lmcache.local_disk": f"file://{out.resolve()}/disk/",
        "lmcache.max_local_disk_size": 0.5,
        "continuum.run_output_dir": str(out.resolve()),
        "continuum.tool_durations_file": str(out.resolve() / "gaps.json"),
        "continuum.program_idle_s": IDLE_S,
        "continuum.policy": "static-ttl",  # whatever pays on this machine, pins come and go
        "continuum.static_ttl_s": GAP_S,
    }
    transfer = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    args = [*ARGS, "--kv-transfer-config", json.dumps(transfer | {"kv_connector_extra_config": extra})]
    model = make_model(ROOT / ".work" / "tiny-model")
    with serve(model, args, log=out / "server.log", env=ENV) as url:
        samples, agents = asyncio.run(soak(url, out, minutes))
    report(samples, agents.failed, docs)


if __name__ == "__main__":
    typer.run(main)
