"""Measures what Ray's proxy and router add to a request.    python -m experiments.fleet.hop

One replica of the small model behind Ray Serve (docs/ray.md), and the same server without Ray. Requests go to
both by turns: later turns of one program, whose prompt is in the KV cache, of one token each, streamed and
whole. The difference of two requests after each other is the hop. Needs the extra `fleet`, and two cores that
do nothing else.
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


def pairs(direct: str, behind_ray: str, requests: int, stream: bool) -> list[tuple[float, float]]:
    """(without Ray, behind Ray) in ms, by request; which of the two is first changes."""
    found = []
    with httpx.Client(timeout=60) as client:
        for i in range(WARM_UP + requests):
            urls = (direct, behind_ray) if i % 2 else (behind_ray, direct)
            taken = {url: answer_ms(client, url, stream) for url in urls}
            found.append((taken[direct], taken[behind_ray]))
    return found[WARM_UP:]


def main(requests: Annotated[int, typer.Option(min=100)] = 500) -> None:
    """Print a table of milliseconds."""
    with TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        bound = {"VLLM_CPU_OMP_THREADS_BIND": ENVIRONMENT["VLLM_CPU_OMP_THREADS_BIND"]}
        bound["OMP_NUM_THREADS"] = "1"  # as Ray sets it for a replica of one core or less
        with (
            serve(model, OPTIONS, log=Path(folder) / "vllm.log", env=bound) as direct,
            serve_fleet(model, Path(folder) / "ray", replicas=1, lmcache_gb=0) as behind_ray,
        ):
            taken = {stream: pairs(direct, behind_ray, requests, stream) for stream in (False, True)}
    table = Table("ms", "without Ray: median", "p99", "behind Ray: median", "p99", "the hop: median", "p99")
    for stream, both in taken.items():
        columns = ([a for a, _ in both], [b for _, b in both], [b - a for a, b in both])
        cells = [f"{x:.1f}" for ms in columns for x in (median(ms), quantiles(ms, n=100)[98])]
        table.add_row("streamed" if stream else "whole", *cells)
    Console().print(table)
    Console().print(f"{requests} requests each, one at a time")


if __name__ == "__main__":
    typer.run(main)
