"""The product on a real server: stock vLLM, real LMCache, the plugin, real clients, and an operator's faults.

One start serves all tests here. The cache is small (23 blocks of 128 tokens), so that a few requests are more
than it holds. The last test ends the server; another one is started only for a test that runs after it.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import psutil
import pytest
from console import Command
from serving import BLOCK, CHUNK_GIB, HTTP, OF_VLLM, Server, ids, serve
from waiting import wait_for

from continuum_lmcache.recordings.reader import load
from continuum_lmcache.report.page import page
from experiments.server import processes, reserved_port

pytestmark = pytest.mark.real

DOCS = Path(__file__).parent.parent / "docs" / "metrics.md"
BLOCKS = 24  # one of them is vLLM's null block
TTL_S = 10.0
ARGS = ("--max-model-len", "2560", "--num-gpu-blocks-override", str(BLOCKS), "--max-num-seqs", "16")
DRAIN = ("--shutdown-timeout", "120")  # vLLM's default, 0, kills the engine at once and lets clients hang
CANARY = "zanzibarquokka"  # in prompts, outputs and ids, and in no file


def transfer_config(folder: Path) -> Path:
    """A KV connector's settings as a file, as a user would write them."""
    extra = {
        "lmcache.mp.autostart": True,
        "lmcache.mp.port": reserved_port(),
        "lmcache.chunk_size": 256,
        "lmcache.local_cpu": True,
        "lmcache.max_local_cpu_size": 150 * CHUNK_GIB,
        "lmcache.local_disk": f"file://{folder}/disk/",
        "lmcache.max_local_disk_size": 1,
    }
    path = folder / "lmcache.json"
    config = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    path.write_text(json.dumps(config))
    return path


@dataclass(frozen=True)
class Continuum(Server):
    """A server whose folder a test can reach."""

    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def is_alive(self) -> bool:
        try:
            return HTTP.get(f"{self.url}/health").status_code == 200
        except httpx.TransportError:
            return False

    def empty(self) -> None:
        """End all pins, and forget the GPU's cache."""
        wait_for(lambda: self.metric("vllm:num_requests_running") == 0, "nothing runs", every_s=0.1)
        HTTP.post(f"{self.url}/reset_prefix_cache").raise_for_status()
        self.usage_becomes(0.0)


@pytest.fixture(scope="module")
def serving_one(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Continuum]]:
    """The module's server, or another one if that has ended."""
    started: list[Continuum] = []
    with contextlib.ExitStack() as running:

        def one() -> Continuum:
            if not started or not started[-1].is_alive:
                folder = tmp_path_factory.mktemp("continuum")
                args = ["--kv-transfer-config", str(transfer_config(folder)), *DRAIN]
                args += ["--scheduling-policy", "continuum"]
                env = {"CONTINUUM_POLICY": "static-ttl", "CONTINUUM_STATIC_TTL_S": str(TTL_S)}
                env["CONTINUUM_RUN_OUTPUT_DIR"] = str(folder / "run")
                env["VLLM_SERVER_DEV_MODE"] = "1"  # for /reset_prefix_cache
                serving = serve(model, [*ARGS, *args], log=folder / "server.log", env=env)
                started.append(Continuum(running.enter_context(serving), folder))
            return started[-1]

        yield one


@pytest.fixture
def continuum(serving_one: Callable[[], Continuum]) -> Continuum:
    return serving_one()


def fill_the_cache(server: Server, story: int) -> None:
    """Send more than the GPU's KV cache holds."""
    for i in range(2):
        server.complete(ids(12 * BLOCK, story + i), out=1)


# usage over a tool gap -------------------------------------------------------


def test_usage_holds_over_a_tool_gap_and_falls_on_an_idle_engine_when_the_ttl_is_over(
    continuum: Continuum,
) -> None:
    continuum.empty()
    sent_s = time.monotonic()
    continuum.complete(ids(5 * BLOCK, 1), job_id="gap")
    pinned = 5 / (BLOCKS - 1)
    continuum.usage_becomes(pinned)  # vLLM records after it has answered
    while True:
        usage = continuum.usage
        if time.monotonic() > sent_s + TTL_S:  # it may have been read after the pin's end
            break
        assert usage == pytest.approx(pinned)
        time.sleep(0.5)
    continuum.usage_becomes(0.0)
    assert continuum.pins("expired") >= 1


# where the next turn finds its prefix ----------------------------------------


def test_a_pinned_programs_next_turn_hits_the_gpu_though_more_than_the_cache_has_passed(
    continuum: Continuum,
) -> None:
    for _ in range(5):
        sent_s = time.monotonic()
        first = continuum.complete(ids(5 * BLOCK, 10), job_id="pinned")
        fill_the_cache(continuum, 20)
        before = continuum.metric("vllm:prefix_cache_hits_total")
        continuum.complete(first.tokens + ids(9, 11), job_id="pinned", is_last_step=True)
        if time.monotonic() < sent_s + TTL_S:  # else the pin may have expired
            break
    assert continuum.metric("vllm:prefix_cache_hits_total") - before == 5 * BLOCK


def test_an_unpinned_prefix_comes_back_from_lmcaches_dram(continuum: Continuum) -> None:
    for attempt in range(5):  # on a machine with other work LMCache may answer too late, and it is computed
        first = continuum.complete(ids(6 * BLOCK, 120 + attempt))  # no job_id: no pin
        fill_the_cache(continuum, 30)
        gpu, dram = continuum.metric("vllm:prefix_cache_hits_total"), loaded(continuum, "dram")
        external = continuum.metric("vllm:external_prefix_cache_hits_total")
        continuum.complete(first.tokens + ids(9, 13))
        assert continuum.metric("vllm:prefix_cache_hits_total") == gpu
        if (found := continuum.metric("vllm:external_prefix_cache_hits_total") - external) > 0:
            break
    assert found == loaded(continuum, "dram") - dram == 6 * BLOCK


def loaded(server: Server, tier: str) -> float:
    return server.metric("continuum_prompt_tokens_total", tier=tier)


def test_outputs_of_a_pinned_program_are_those_that_vllm_computes_without_a_cache(
    continuum: Continuum,
) -> None:
    """Five turns: every one hits the last one's blocks."""
    context = ids(2 * BLOCK + 30, 50)
    for turn in range(5):
        found = continuum.metric("vllm:prefix_cache_hits_total")
        answer = continuum.complete(context, job_id="same")
        assert turn == 0 or continuum.metric("vllm:prefix_cache_hits_total") > found
        continuum.check_without_cache(answer)
        context = answer.tokens + ids(2 * BLOCK, 51 + turn)


# real clients ----------------------------------------------------------------


@pytest.fixture
def client(continuum: Continuum) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{continuum.url}/v1", api_key="none", max_retries=0)


def took_a_pin(server: Server, before: float) -> None:
    """The count follows the answer by a moment: vLLM records after it has answered."""
    wait_for(lambda: server.pins("taken") > before, "a pin is taken", every_s=0.1)
    assert server.pins("taken") == before + 1


WORDS = "the quick brown fox jumps over the lazy dog " * 10  # one full block
MESSAGES = [{"role": "user", "content": WORDS}]
Identity = Callable[[str], dict[str, dict[str, Any]]]
IDENTITIES: dict[str, Identity] = {
    "top-level": lambda name: {"extra_body": {"job_id": f"c1-{name}"}},
    "vllm_xargs": lambda name: {"extra_body": {"vllm_xargs": {"job_id": f"c2-{name}"}}},
    "session header": lambda name: {"extra_headers": {"X-Session-ID": f"c3-{name}"}},
}


@pytest.mark.parametrize("identity", IDENTITIES.values(), ids=IDENTITIES.keys())
def test_the_vendors_clients_name_their_program_on_every_endpoint(
    continuum: Continuum, client: openai.OpenAI, identity: Identity
) -> None:
    before = continuum.pins("taken")
    for number, _ in enumerate(on_every_endpoint(continuum, client, identity)):
        took_a_pin(continuum, before + number)


def test_is_last_step_takes_no_pin_on_any_endpoint(continuum: Continuum, client: openai.OpenAI) -> None:
    before = continuum.pins("taken")
    turns = on_every_endpoint(
        continuum, client, lambda name: {"extra_body": {"job_id": f"c9-{name}", "is_last_step": True}}
    )
    assert len(list(turns)) == 4
    assert continuum.pins("taken") == before


def on_every_endpoint(continuum: Continuum, client: openai.OpenAI, more: Identity) -> Iterator[Any]:
    """A turn on each, by its vendor's client and with a name of its own: their prompts differ."""
    claude = anthropic.Anthropic(base_url=continuum.url, api_key="none", max_retries=0)
    yield client.completions.create(model="tiny", prompt=WORDS, max_tokens=4, **more("completions"))
    yield client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=4, **more("chat"))
    yield client.responses.create(model="tiny", input=WORDS, max_output_tokens=4, **more("responses"))
    yield claude.messages.create(model="tiny", messages=MESSAGES, max_tokens=4, **more("messages"))


def test_a_streamed_turn_and_one_with_a_stop_string_are_pinned(
    continuum: Continuum, client: openai.OpenAI
) -> None:
    before = continuum.pins("taken")
    body = {"job_id": "c10"}
    with client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=4, stream=True, extra_body=body
    ) as stream:
        assert list(stream)
    took_a_pin(continuum, before)
    text = client.completions.create(model="tiny", prompt=WORDS + "f", max_tokens=30, temperature=0)
    stop = text.choices[0].text.strip()[-3:]
    again = client.completions.create(
        model="tiny",
        prompt=WORDS + "f",
        max_tokens=200,
        temperature=0,
        stop=[stop],
        extra_body={"job_id": "c11"},
    )
    assert again.choices[0].finish_reason == "stop"
    took_a_pin(continuum, before + 1)


BAD = {
    "a megabyte": {"job_id": "x" * 10**6},
    "an object": {"job_id": {"a": 1}},
    "empty": {"job_id": ""},
    "maybe": {"is_last_step": "maybe"},
    "a list": {"this_func_call": ["bash"]},
    "in vllm_xargs": {"vllm_xargs": {"job_id": ""}},
}


@pytest.mark.parametrize("fields", BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses", "messages"])
def test_a_bad_field_gets_400_with_a_sentence(
    continuum: Continuum, path: str, fields: dict[str, object]
) -> None:
    prompt = {"completions": {"prompt": "hi"}, "responses": {"input": "hi"}}
    body = prompt.get(path, {"messages": [{"role": "user", "content": "hi"}]})
    body = {"model": "tiny", "max_tokens": 2, **body, **fields}
    response = HTTP.post(f"{continuum.url}/v1/{path}", json=body)
    assert response.status_code == 400
    assert next(iter(fields.get("vllm_xargs", fields))) in response.json()["error"]["message"]


# operation -------------------------------------------------------------------


def test_the_idle_engine_does_not_spin_while_it_holds_a_pin(continuum: Continuum) -> None:
    [engine] = continuum.engines

    def engine_cpu_s() -> float:
        times = engine.cpu_times()
        return times.user + times.system

    for _ in range(5):
        continuum.complete(ids(5 * BLOCK, 61), job_id="idle")
        before_s = engine_cpu_s()
        time.sleep(3)
        used_s = engine_cpu_s() - before_s
        if is_pinned := continuum.usage > 0:
            break
    assert is_pinned, "the pin is gone: nothing was measured"
    assert used_s < 0.5, f"{used_s} CPU seconds in 3 idle ones"


# metrics ------------------------------------------------------------------------


def kind_shown(name: str, meaning: str) -> str:
    """A metric's type, as its row of docs/metrics.md shows it."""
    if name.endswith("_total"):
        return "counter"
    return "histogram" if meaning.endswith("(histogram)") else "gauge"


def test_every_metric_of_the_docs_is_scraped_with_its_type_and_passes_promtools_lint(
    continuum: Continuum,
) -> None:
    continuum.complete(ids(5 * BLOCK, 62), job_id="metrics")  # ours begin with the first step
    text = HTTP.get(f"{continuum.url}/metrics").text
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    row = r"^\| `(continuum_(?!fleet_)\w+)(?:{\w+})?` \| (.*) \|$"
    rows = re.findall(row, DOCS.read_text(), re.MULTILINE)
    listed = {name: kind_shown(name, meaning) for name, meaning in rows}
    assert len(listed) == 33
    assert {name: types.get(name) for name in listed} == listed
    assert set(re.findall(r"^([\w:]+)[{ ]", text, re.MULTILINE)) >= OF_VLLM
    if promtool := shutil.which("promtool"):
        ran = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True)
        complaints = [line for line in (ran.stdout + ran.stderr).splitlines() if "continuum_" in line]
        assert complaints == []


def test_a_pins_life_is_in_the_histograms_and_the_tiers_sizes_are_reported(continuum: Continuum) -> None:
    def count(histogram: str, **labels: str) -> float:
        return continuum.metric(f"{histogram}_count", **labels)

    names = ("continuum_ttl_seconds", "continuum_tool_gap_seconds", "continuum_queue_delay_seconds")
    before = [count(name) for name in names]
    first = continuum.complete(ids(5 * BLOCK, 31), job_id="told", this_func_call="read")
    continuum.complete(first.tokens + ids(9, 32), job_id="told", is_last_step=True)
    wanted = [seen + more for seen, more in zip(before, (1, 1, 2), strict=True)]
    wait_for(lambda: [count(name) for name in names] == wanted, f"counts are {wanted}", every_s=0.1)
    assert continuum.metric("continuum_tier_capacity_tokens", tier="dram") >= 30_000
    assert continuum.metric("continuum_policy_info", policy="static-ttl") == 1
    assert continuum.metric("continuum_gpu_capacity_tokens") == pytest.approx(BLOCKS * BLOCK, rel=0.05)


# the console ------------------------------------------------------------------


def test_status_reads_a_running_server(continuum: Continuum, capsys: pytest.CaptureFixture[str]) -> None:
    continuum.complete(ids(8 * BLOCK, 70))
    found = Command(capsys)("status", continuum.url, "--json").json
    assert found["summary"].startswith("continuum is on: policy ")
    figures = found["figures"]
    assert figures["running_turns"] is not None and figures["kv_usage"] is not None
    assert found["prompt_tokens"].keys() >= {"gpu", "none"} and figures["finished_turns"] > 0
    assert figures["first_token_s"] > 0


def test_top_and_report_read_a_running_server(
    continuum: Continuum, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    continuum.complete(ids(5 * BLOCK, 90), job_id="seen", this_func_call="pytest")
    console = Command(capsys)
    (rank,) = console("top", continuum.url, "--json").json
    (row,) = [row for row in rank["programs"] if row["tool"] == "pytest"]
    assert row["pinned_s"] is None or 0 <= row["pinned_s"] < TTL_S  # a busy machine's pin may be over
    assert row["context_tokens"] >= 5 * BLOCK
    assert row["program"] in console("top", continuum.url, "--once").out
    found = console("report", continuum.url, "--json").json["runs"][0]
    assert found["programs"] >= 1 and found["turns"] >= 1
    assert "pytest" in console("report", continuum.url, "--program", row["program"]).out
    assert "wrote" in console("report", continuum.url, "--out", tmp_path / "page.html").out
    for rank_name in ("1", "-1", "x", "\N{SUPERSCRIPT TWO}"):
        asked = HTTP.get(f"{continuum.url}/v1/continuum/recording", params={"rank": rank_name})
        assert asked.status_code == 400 and "must be a number below 1" in asked.text


# text of clients --------------------------------------------------------------


def test_no_text_of_a_prompt_an_output_or_an_id_is_in_any_file_of_the_run(continuum: Continuum) -> None:
    call = f"```bash\npytest tests/{CANARY} && cat {CANARY}.txt\n```"
    message = {"role": "user", "content": f"the secret is {CANARY}"}
    body = {
        "model": "tiny",
        "messages": [message],
        "job_id": f"{CANARY}-1",
        "structured_outputs": {"choice": [call]},
        "max_tokens": len(call) + 8,
    }
    answer = HTTP.post(f"{continuum.url}/v1/chat/completions", json=body).json()
    assert CANARY in answer["choices"][0]["message"]["content"]
    wait_for(lambda: '"pytest"' in recorded(continuum), "the call is recorded", every_s=0.2)
    (path,) = continuum.run.iterdir()
    assert CANARY not in path.read_text() + page([load(continuum.run)])


def recorded(continuum: Continuum) -> str:
    (text,) = continuum.recordings(continuum.run / "scheduler_timestamps")
    return text


def test_a_recorders_folder_that_vanishes_is_made_again(continuum: Continuum) -> None:
    shutil.rmtree(continuum.run)
    continuum.complete(ids(2 * BLOCK, 90), job_id="unseen")
    wait_for(lambda: "Request_departure_time" in recorded(continuum), "a turn is recorded", every_s=0.2)


# the end ----------------------------------------------------------------------


def test_after_all_of_it_no_memory_is_held(continuum: Continuum) -> None:
    continuum.usage_becomes(0.0)  # pins expire
    assert continuum.metric("vllm:num_requests_running") == continuum.metric("vllm:num_requests_waiting") == 0


def test_sigterm_under_load_answers_every_request_saves_the_recording_and_leaves_no_process(
    continuum: Continuum,
) -> None:
    all_of_it = processes(continuum.url)

    def story(i: int) -> int:
        return len(continuum.complete(ids(BLOCK, i), out=100, job_id=f"last-{i}").output)

    def prompt_tokens() -> float:
        return continuum.metric("vllm:prompt_tokens_total")

    before, stories = prompt_tokens(), []
    with ThreadPoolExecutor(8) as pool:
        while continuum.metric("vllm:num_requests_running") < 4:
            assert len(stories) < 200, "four requests were never seen to run at once"
            stories += [pool.submit(story, len(stories) + i) for i in range(8)]
            while prompt_tokens() < before + len(stories) * BLOCK:  # after the signal it would be refused
                time.sleep(0.01)
        all_of_it[0].send_signal(signal.SIGTERM)
        assert [story.result() for story in stories] == [100] * len(stories)
    _, alive = psutil.wait_procs(all_of_it, timeout=300)
    assert not alive
    snapshot = json.loads((continuum.run / "scheduler_timestamps").read_text())
    assert len(snapshot) >= len(stories)
