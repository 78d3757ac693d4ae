"""Faults on a live server: stock vLLM, real LMCache, the plugin, and an operator's usual problems.

One server. After every fault it answers as before, and what the fault cost is in /metrics. The last
test ends the server; another one is started only for a test that runs after it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import BLOCK, CHUNK_GIB, Server, ids, serve
from waiting import PATIENCE_S, wait_for

from continuum_lmcache.programs.identity import REFUSED
from continuum_lmcache.recordings.reader import load
from continuum_lmcache.report.page import page
from experiments.server import processes, reserved_port

pytestmark = pytest.mark.real

CANARY = "zanzibarquokka"  # in prompts, outputs and ids, and in no file
TTL_S = 1.0
ARGS = ("--max-model-len", "2560", "--num-gpu-blocks-override", "24", "--scheduling-policy", "continuum")
DRAIN = ("--shutdown-timeout", "120")  # vLLM's default, 0, kills the engine at once and lets clients hang
STORIES = itertools.count(1000)
MANY = 100


@dataclass(frozen=True)
class Faulty(Server):
    """A server whose folders and processes a test can reach."""

    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def processes(self) -> list[psutil.Process]:
        return processes(self.url)

    @property
    def is_alive(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=PATIENCE_S).status_code == 200
        except httpx.TransportError:
            return False


@pytest.fixture(scope="module")
def serving_one(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Faulty]]:
    """The module's server, or another one if that has ended."""
    started: list[Faulty] = []
    with contextlib.ExitStack() as running:

        def one() -> Faulty:
            if not started or not started[-1].is_alive:
                started.append(running.enter_context(faulty(model, tmp_path_factory.mktemp("faults"))))
            return started[-1]

        yield one


@pytest.fixture
def server(serving_one: Callable[[], Faulty]) -> Faulty:
    return serving_one()


@contextlib.contextmanager
def faulty(model: Path, folder: Path) -> Iterator[Faulty]:
    (folder / "lmcache.json").write_text(
        json.dumps(
            {
                "kv_connector": "LMCacheConnectorV1",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "lmcache.mp.port": reserved_port(),
                    "lmcache.max_local_cpu_size": 10 * CHUNK_GIB,
                    "lmcache.local_disk": f"file://{folder}/disk/",
                    "lmcache.max_local_disk_size": 1,
                    "continuum.policy": "experiments.policies:always_loads",  # a load rarely pays here
                    "continuum.static_ttl_s": TTL_S,
                    "continuum.run_output_dir": f"{folder}/run",
                },
            }
        )
    )
    args = [*ARGS, *DRAIN, "--kv-transfer-config", str(folder / "lmcache.json")]
    with serve(model, args, log=folder / "server.log") as url:
        server = Faulty(url, folder)
        yield server


# ids and text of clients --------------------------------------------------------------------------

NASTY = {
    "quotes": 'a"} 1\nvllm:evil_total{x="',
    "controls": "\x00\x1b[2J\r\n",
    "path": "../../../etc/passwd",
    "right-to-left": "\u202egnp.exe",
    "surrogate": "\ud800",
    "wide": "💣" * 256,
}


@pytest.mark.parametrize("name", NASTY.values(), ids=NASTY.keys())
def test_control_characters_in_ids_harm_neither_metrics_nor_files(server: Faulty, name: str) -> None:
    body = {"model": "tiny", "prompt": ids(BLOCK), "max_tokens": 1, "job_id": name, "this_func_call": name}
    response = httpx.post(
        f"{server.url}/v1/completions",
        content=json.dumps(body),  # httpx itself encodes no lone surrogate
        headers={"content-type": "application/json"},
        timeout=PATIENCE_S,
    )
    is_refused = REFUSED.search(name) is not None
    assert response.status_code == (400 if is_refused else 200), response.text
    assert not is_refused or "job_id has a control character" in response.text
    assert server.complete(ids(BLOCK), out=1).output

    def metrics() -> set[str]:
        text = httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text
        return {family.name for family in text_string_to_metric_families(text)}

    wait_for(lambda: "continuum_pins" in metrics(), "a turn is in the metrics", every_s=0.1)
    assert not any("evil" in name for name in metrics())


def test_ids_and_tools_of_the_clients_own_leave_no_metric_of_their_own(server: Faulty) -> None:
    """10^5 ids go to the scheduler itself elsewhere."""

    def samples() -> int:
        text = httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text
        return sum(line.startswith("continuum_") for line in text.splitlines())

    def one(i: int) -> None:
        server.complete(ids(4), out=1, job_id=f"one-of-many-{i}", this_func_call=f"tool-{i}")

    before = samples()
    with ThreadPoolExecutor(16) as pool:
        assert len(list(pool.map(one, range(MANY)))) == MANY
    assert samples() - before < MANY / 2
    assert server.metric("continuum_programs") >= MANY


def test_no_text_of_a_prompt_an_output_or_an_id_is_in_any_file_of_the_run(server: Faulty) -> None:
    call = f"```bash\npytest tests/{CANARY} && cat {CANARY}.txt\n```"
    message = {"role": "user", "content": f"the secret is {CANARY}"}
    body = {
        "model": "tiny",
        "messages": [message],
        "job_id": f"{CANARY}-1",
        "structured_outputs": {"choice": [call]},
        "max_tokens": len(call) + 8,
    }
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE_S).json()
    assert CANARY in answer["choices"][0]["message"]["content"]
    texts = recorded(server, '"pytest"')
    texts.append(page([load(server.run)]))
    assert not any(secret in text for text in texts for secret in (CANARY, "one-of-many"))


def recorded(server: Faulty, wanted: str) -> list[str]:
    """The run's recording, requested until it has `wanted`."""
    end_s = time.monotonic() + PATIENCE_S
    while True:
        ask_for_files(server)
        time.sleep(0.2)
        texts = [path.read_text() for path in server.run.iterdir() if path.suffix != ".tmp"]
        if len(texts) == 1 and wanted in texts[0]:
            return texts
        assert time.monotonic() < end_s, f"{wanted!r} is not in {[*server.run.iterdir()]}"


def ask_for_files(server: Faulty) -> None:
    for process in server.processes:
        if "EngineCore" in " ".join(process.cmdline()):
            process.send_signal(signal.SIGUSR1)


def test_a_recorders_folder_that_vanishes_costs_that_file_and_nothing_else(server: Faulty) -> None:
    log = server.folder / "server.log"
    shutil.rmtree(server.run)
    ask_for_files(server)
    wait_for(lambda: "recording not written" in log.read_text(), "the log says so", every_s=0.1)
    server.complete(ids(2 * BLOCK, next(STORIES)), job_id="unseen")
    server.run.mkdir()
    assert recorded(server, "Request_departure_time")


# the end ------------------------------------------------------------------------------------------


def test_after_all_faults_no_memory_is_held(server: Faulty) -> None:
    server.usage_becomes(0.0)
    assert server.metric("vllm:num_requests_running") == server.metric("vllm:num_requests_waiting") == 0


def test_sigterm_under_load_answers_every_request_saves_the_recording_and_leaves_no_process(
    server: Faulty,
) -> None:
    all_of_it = server.processes

    def story(i: int) -> int:
        return len(server.complete(ids(BLOCK, i), out=100, job_id=f"last-{i}").output)

    def prompt_tokens() -> float:
        return server.metric("vllm:prompt_tokens_total")

    before, stories = prompt_tokens(), []
    with ThreadPoolExecutor(8) as pool:
        while server.metric("vllm:num_requests_running") < 4:
            assert len(stories) < 200, "four requests were never seen to run at once"
            stories += [pool.submit(story, len(stories) + i) for i in range(8)]
            while prompt_tokens() < before + len(stories) * BLOCK:  # after the signal it would be refused
                time.sleep(0.01)
        all_of_it[0].send_signal(signal.SIGTERM)
        assert [story.result() for story in stories] == [100] * len(stories)
    _, alive = psutil.wait_procs(all_of_it, timeout=300)
    assert not alive
    snapshot = json.loads((server.run / "scheduler_timestamps").read_text())
    assert len(snapshot) >= len(stories)
