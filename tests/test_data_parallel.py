"""`--data-parallel-size 2` on a real server: a program finds on its return what its last turn left.

Two engines of one core each behind one API server. Several API servers: tests/test_data_parallel_routing.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from serving import BLOCK, HTTP, Server, ids, serve
from waiting import wait_for

pytestmark = pytest.mark.real

PROGRAMS, TURNS = 8, 3
ARGS = ("--max-model-len", "2048", "--num-gpu-blocks-override", "128", "--enable-prompt-tokens-details")
TWO = ("--data-parallel-size", "2", "--gpu-memory-utilization", "0.3", "--api-server-count", "1")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("ranks")
    env = {"CONTINUUM_POLICY": "static-ttl", "CONTINUUM_STATIC_TTL_S": "60"}
    env["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    args = [*ARGS, *TWO, "--scheduling-policy", "continuum"]
    with serve(model, args, log=folder / "server.log", env=env, start_s=700) as url:
        yield Server(url)


def found_tokens(server: Server, turn: int, program: int) -> int:
    """How much of a turn's prompt the engine that it came to had."""
    prompt = ids(turn * 2 * BLOCK + 1, story=program)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "job_id": f"run-{program}"}
    answer = HTTP.post(f"{server.url}/v1/completions", json=body, timeout=600).json()
    return int((answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


def test_every_turn_meets_the_engine_that_holds_its_programs_kv(server: Server) -> None:
    with ThreadPoolExecutor(PROGRAMS) as pool:  # all at once: vLLM spreads them
        for turn in range(1, TURNS + 1):
            found = list(pool.map(partial(found_tokens, server, turn), range(PROGRAMS)))
            assert found == [(turn - 1) * 2 * BLOCK] * PROGRAMS

    def answered() -> list[float]:
        return [server.metric("vllm:request_success_total", engine=rank) for rank in "01"]

    wait_for(lambda: sum(answered()) == PROGRAMS * TURNS, "all turns are counted", every_s=0.1)
    by_engine = answered()
    assert min(by_engine) >= TURNS
    assert all(n % TURNS == 0 for n in by_engine), "a program was on both"
