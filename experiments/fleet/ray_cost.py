"""What a turn costs Ray's proxy and the fleet's state.    python -m experiments.fleet.ray_cost

A real Ray Serve with the product's names, router, state and reports; its replicas answer at once instead of
running vLLM. CPU time of the processes, which other load on the machine does not change, and latency, which
it does. Needs an environment with Ray (docs/fleet.md).
"""

from __future__ import annotations

import asyncio
import os
import time
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import ray
import typer
from ray import serve
from ray.serve._private.constants import SERVE_DEPLOYMENT_ACTOR_PREFIX, SERVE_NAMESPACE
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from continuum_lmcache.fleet.fleet import KnownProgram, ReplicaId, ReplicaReport
from continuum_lmcache.serve import app, scaling
from continuum_lmcache.serve.replica import Replica, ReplicaHeader
from continuum_lmcache.serve.settings import ServeSettings
from continuum_lmcache.types import ProgramId
from experiments.server import reserved_port
from experiments.sim.result import percentile
from experiments.tables import markdown

REPORTS = 2000
IN_TIME = 25.0
PROCESSES = "ray::ProxyActor", "ray::FleetState"
STATE_OF = f"{SERVE_DEPLOYMENT_ACTOR_PREFIX}default::vllm::"
PROMPT = "x" * 20_000  # 5,000 tokens of text


class Answering(Replica):
    """A replica without an engine: each turn is answered at once, and reports go to the state. To autoscaling
    it says that it serves IN_TIME programs in time."""

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {
            scaling.LIVE: float(len(self._programs._programs)),
            scaling.IN_TIME: IN_TIME,
        }

    async def __serve_build_asgi_app__(self) -> ReplicaHeader:
        async def healthy() -> None:
            """It always is."""

        self._engine = SimpleNamespace(wait_s=None, check_health=healthy, shutdown=lambda: None)

        async def turn(_request: Any) -> PlainTextResponse:
            self._watch(SimpleNamespace(extra_args=None), "cmpl-1")(True)
            return PlainTextResponse("done")

        async def fleet(_request: Any) -> Response:
            return await self.fleet()

        self._reporting = asyncio.create_task(self._report())
        routes = [Route("/v1/completions", turn, methods=["POST"]), Route("/fleet", fleet)]
        return ReplicaHeader(Starlette(routes=routes), self._name)


def process_of(name: str) -> psutil.Process:
    """The one process below this whose command line begins so."""
    (found,) = [p for p in psutil.Process().children(recursive=True) if name in "".join(p.cmdline()[:1])]
    return found


def cpu_s(name: str) -> float:
    """Its CPU seconds so far."""
    times = process_of(name).cpu_times()
    return float(times.user + times.system)


async def turns(
    url: str, programs: int, turns: int, at_once: int, homes: dict[int, set[str]] | None = None
) -> list[float]:
    """Latency of each turn, seconds. `homes`: by program, gets the replicas that answered."""
    found: list[float] = []
    gate, homes = asyncio.Semaphore(at_once), {} if homes is None else homes
    async with httpx.AsyncClient(timeout=120) as client:

        async def program(number: int) -> None:
            async with gate:
                for _ in range(turns):
                    begin_s = time.monotonic()
                    body = {"model": "m", "prompt": PROMPT, "job_id": f"run-{number}"}
                    answer = (await client.post(f"{url}/v1/completions", json=body)).raise_for_status()
                    found.append(time.monotonic() - begin_s)
                    homes.setdefault(number, set()).add(answer.headers["x-continuum-replica"])

        await asyncio.gather(*(program(number) for number in range(programs)))
    return found


async def reports(state: Any) -> list[float]:
    """Latency of reports of a thousand replicas, each with a program that has changed."""
    found = []
    for number in range(REPORTS):
        begin_s, report = time.monotonic(), ReplicaReport(ReplicaId(f"far-{number % 1000}"))
        await state.take_report.remote(report, [KnownProgram(ProgramId(f"p{number}"))], "another")
        found.append(time.monotonic() - begin_s)
    return found


def main(programs: int = 400, turns_each: int = 5, at_once: int = 8) -> None:
    """Run, and print a table in Markdown; then kill the state under its programs."""
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
    app.prepare()
    port = reserved_port()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    settings = ServeSettings("m", replicas=2, gpus=0, cpus=0.1, key="00" * 32)
    serve.run(app.deployment(settings, Answering).bind(settings))
    url = f"http://127.0.0.1:{port}"
    asyncio.run(turns(url, 20, 3, at_once))  # warm
    lines = [["", "calls", "a second", "P50, ms", "P99, ms", "proxy, CPU ms a call", "state, CPU ms a call"]]
    [name] = [n["name"] for n in ray.util.list_named_actors(all_namespaces=True) if STATE_OF in n["name"]]
    state = ray.get_actor(name, namespace=SERVE_NAMESPACE)
    homes: dict[int, set[str]] = {}
    for what, calls in (
        ("turns", lambda: turns(url, programs, turns_each, at_once, homes)),
        ("reports", lambda: reports(state)),
    ):
        before, begin_s = [cpu_s(each) for each in PROCESSES], time.monotonic()
        found = asyncio.run(calls())
        took_s, n = time.monotonic() - begin_s, len(found)
        cpu_ms = [1e3 * (cpu_s(each) - b) / n for each, b in zip(PROCESSES, before, strict=True)]
        latency_ms = [1e3 * percentile(found, q) for q in (50, 99)]
        lines.append([what, f"{n}", f"{n / took_s:.0f}", *(f"{ms:.1f}" for ms in latency_ms + cpu_ms)])
    print(markdown(lines))
    process_of(PROCESSES[1]).kill()
    found = asyncio.run(turns(url, programs, 1, at_once, homes))
    kept = sum(len(replicas) == 1 for replicas in homes.values())
    print(
        f"\nthe state was killed: longest turn {max(found):.1f} s, {kept} of {programs} programs kept theirs"
    )
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    typer.run(main)
