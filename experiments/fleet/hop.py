"""Measures what Ray's proxy and router add to a request.    python -m experiments.fleet.hop

The same server of the small model without Ray, then as the one replica behind Ray Serve (docs/ray.md), then
again without it: two engines at once would wait for each other's cores. Requests are later turns of one
program, whose prompt is in the KV cache, of one token each, streamed and whole. Needs the extra `fleet`, and
two cores that do nothing else.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `python PATH` as well as -m

from experiments.ray_server import ENVIRONMENT, OPTIONS, serve_fleet
from experiments.server import serve
from experiments.tiny_model import VOCAB_TOKENS, make_model

PROMPT_TOKENS = 64
WARM_UP = 20


def answer_ms(client: httpx.Client, url: str, stream: bool) -> float:
    """Milliseconds until the end of an answer of one token. Raises httpx.HTTPStatusError for any other."""
    prompt = [i % (VOCAB_TOKENS - 3) + 3 for i in range(PROMPT_TOKENS)]
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0, "job_id": "hop"}
    start_s = time.perf_counter()
    client.post(f"{url}/v1/completions", json=body | {"stream": stream}).raise_for_status()
    return (time.perf_counter() - start_s) * 1e3


def taken_ms(url: str, requests: int) -> dict[bool, list[float]]:
    """Streamed or not, the time of each request."""
    with httpx.Client(timeout=60) as client:
        return {
            stream: [answer_ms(client, url, stream) for _ in range(WARM_UP + requests)][WARM_UP:]
            for stream in (False, True)
        }


def main(requests: Annotated[int, typer.Option(min=100)] = 500) -> None:
    """Print a table of milliseconds."""
    with TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        env = {"VLLM_CPU_OMP_THREADS_BIND": ENVIRONMENT["VLLM_CPU_OMP_THREADS_BIND"]}
        env["OMP_NUM_THREADS"] = "1"  # as Ray sets it for a replica of one core or less
        found = {}
        for name in ("without Ray", "behind Ray", "without Ray, again"):
            if name == "behind Ray":
                server = serve_fleet(model, Path(folder) / "ray", replicas=1, lmcache_gb=0)
            else:
                server = serve(model, OPTIONS, log=Path(folder) / "vllm.log", env=env)
            with server as url:
                found[name] = taken_ms(url, requests)
    table = Table("ms", "whole: median", "p99", "streamed: median", "p99")
    for name, ms in found.items():
        table.add_row(name, *(f"{x:.1f}" for s in ms for x in (median(ms[s]), quantiles(ms[s], n=100)[98])))
    Console().print(table)
    Console().print(f"{requests} requests each, one at a time")


if __name__ == "__main__":
    typer.run(main)
