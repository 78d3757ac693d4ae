"""`--api-server-count 2 --data-parallel-size 2`: two front-ends and two engines share programs and figures.

One server. Each request has a connection of its own, so that either front-end may take it.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
from prometheus_client.mmap_dict import MmapedDict
from serving import BLOCK, Server, ids, serve
from waiting import wait_for

from continuum_lmcache.types import PinEnd
from experiments.server import processes

pytestmark = pytest.mark.real

PROGRAMS = 24
TTL_S = 600.0
ARGS = ("--max-model-len", "1024", "--num-gpu-blocks-override", "96", "--scheduling-policy", "continuum")
TWO = ("--api-server-count", "2", "--data-parallel-size", "2", "--gpu-memory-utilization", "0.3")
KEYS = ("--api-key", "key-of-ann", "key-of-bob")


@dataclass(frozen=True)
class Pair(Server):
    """A server with two front-ends; each keeps its figures in a separate file."""

    folder: Path

    def answered(self) -> list[float]:
        """How many requests each front-end has answered."""
        found = []
        for path in self.folder.glob("figures/counter_*.db"):
            values = MmapedDict.read_all_values_from_file(str(path))
            found += [sum(n for key, n, *_ in values if "vllm:request_success_total" in key)]
        return found

    def pins_held(self) -> float:
        return self.pins("taken") - sum(self.pins(end.value) for end in PinEnd)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("two")
    (folder / "figures").mkdir()
    env = {"CONTINUUM_POLICY": "static-ttl", "CONTINUUM_STATIC_TTL_S": str(TTL_S)}
    env |= {"CONTINUUM_MAX_TTL_S": str(TTL_S), "CONTINUUM_RUN_OUTPUT_DIR": str(folder / "run")}
    env["CONTINUUM_RECORD_IDS"] = "true"
    env["PROMETHEUS_MULTIPROC_DIR"] = str(folder / "figures")
    env["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    with serve(model, [*ARGS, *TWO, *KEYS], log=folder / "server.log", env=env, start_s=700) as url:
        yield Pair(url, folder, key="key-of-ann")


def test_a_program_keeps_its_pin_whichever_front_end_takes_its_turns(server: Pair) -> None:
    def program(i: int) -> int:
        first = server.complete(ids(BLOCK + 9, i), out=2, job_id=f"p{i}")
        server.complete(first.tokens + ids(5, 1000 + i), out=2, job_id=f"p{i}")
        return i

    with ThreadPoolExecutor(4) as pool:
        for at, other in enumerate(front_ends(server)):  # the kernel chooses which one gets a connection
            other.suspend()
            try:
                assert len(list(pool.map(program, range(at, PROGRAMS, 2)))) == PROGRAMS / 2
            finally:
                other.resume()
    server.usage_becomes(PROGRAMS / 95)
    assert server.metric("continuum_programs") == PROGRAMS
    assert [n for n in server.answered() if n] == [PROGRAMS, PROGRAMS], "each took half of the turns"
    by_engine = [server.metric("vllm:request_success_total", engine=rank) for rank in "01"]
    assert min(by_engine) > 0 and all(n % 2 == 0 for n in by_engine), "no program was on both engines"


def front_ends(server: Server) -> list[psutil.Process]:
    """Its two API servers."""
    found = [process for process in processes(server.url) if "APIServer" in "".join(process.cmdline())]
    assert len(found) == 2, [process.cmdline() for process in processes(server.url)]
    return found


def test_the_figures_count_once_whoever_is_asked(server: Pair) -> None:
    for _ in range(6):  # each time one of the two answers
        assert (server.pins("taken"), server.pins("reused")) == (2 * PROGRAMS, PROGRAMS)
        assert server.pins_held() == PROGRAMS
        assert server.metric("continuum_tool_gap_seconds_count") == PROGRAMS
        assert server.metric("continuum_prompt_tokens_total", tier="gpu") == PROGRAMS * BLOCK
        assert server.metric("vllm:request_success_total") == 2 * PROGRAMS


def test_a_program_stays_with_its_key_whichever_front_end_takes_its_turns(server: Pair) -> None:
    bob = replace(server, key="key-of-bob")
    reused, ended, held = server.pins("reused"), server.pins("ended"), server.pins_held() + 1
    first = server.complete(ids(BLOCK + 9, 900), out=2, job_id="shared")
    wait_for(lambda: server.pins_held() == held, "its pin is counted", every_s=0.1)
    for i in range(6):
        bob.complete(ids(BLOCK, 901 + i), out=2, job_id="shared", is_last_step=True)
    assert (server.pins("ended"), server.pins_held()) == (ended, held)
    server.complete(first.tokens + ids(5, 910), out=2, job_id="shared", is_last_step=True)

    def pins() -> tuple[float, float]:
        return server.pins("reused"), server.pins_held()

    wait_for(lambda: pins() == (reused + 1, held - 1), "its pin was reused", every_s=0.1)
    paths = [server.folder / "run" / f"scheduler_timestamps{rank}" for rank in ("", "_dp1")]
    assert "shared" in "".join(server.recordings(*paths))
    written = b"".join(path.read_bytes() for path in server.folder.rglob("*") if path.is_file())
    assert b"key-of" not in written, "neither the log, nor a recording, nor a figure holds a key"
