"""vLLM's HTTP server in Rust before our engine: names that arrive, figures that status finds, keys refused.

The CPU wheel of vLLM has no `vllm-rs`: the live tests take that of VLLM_RUST_FRONTEND_PATH, out of the wheel
for CUDA of the installed version.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from client_requests import CLIENTS, PARENT, Client, completion, session
from console import Command, metrics_server
from console import text_of as page
from serving import HTTP, Server, ids, serve
from vllm.sampling_params import SamplingParams

from continuum_lmcache.config import METRICS_PORT_OFFSET, ContinuumConfig
from continuum_lmcache.errors import ConfigError
from continuum_lmcache.programs.identity import OWNER_FIELD
from continuum_lmcache.vllm_plugin.hooks import rust_frontend
from continuum_lmcache.vllm_plugin.requests import new_turn

RUST_PATH = os.environ.get("VLLM_RUST_FRONTEND_PATH", "")
ARGS = (
    *("--max-model-len", "2560", "--scheduling-policy", "continuum", "--max-num-seqs", "16"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
)
FIELDS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {  # headers and body, of a chat
    "header X-Session-ID": ({"X-Session-ID": "field-1"}, {}),
    "header X-Correlation-ID": ({"X-Correlation-ID": "field-2"}, {}),
    "session_id": ({}, {"session_id": "field-3"}),
    "job_id": ({}, {"job_id": "field-4"}),
    "program_id": ({}, {"program_id": "field-5"}),
    "vllm_xargs.job_id": ({}, {"vllm_xargs": {"job_id": "field-6"}}),
}
BOTH = {  # clients and fields that name a program by the Python server and by the Rust one
    *("OpenCode", "Harbor", "agent_hint in vllm_xargs"),
    *("agentic_context", "agentic_context of a session's agents"),
    *("header X-Session-ID", "session_id", "vllm_xargs.job_id"),
}
UNNAMED = {  # by neither: hints, which alone name nothing
    *("Claude Code, headers stripped", "Claude Code before 2.1.78", "prompt_cache_key", "AgentX"),
    "header X-Correlation-ID",
}
RUST_VERSION = '{"version": "0.32.0", "rust_frontend_version": "0.32.0"}'
RUST = {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": RUST_PATH}


def turn(session_id: str | None = None, max_tokens: int = 8, **xargs: Any) -> tuple[Any, list[str]]:
    """What the engine makes of a request that the Rust server has passed on."""
    params = SamplingParams(max_tokens=max_tokens, extra_args=xargs or None)
    request: Any = SimpleNamespace(
        request_id="r", sampling_params=params, session_id=session_id, priority=0, cache_salt=None
    )
    request.max_tokens = max_tokens
    return new_turn(request, ContinuumConfig(), from_rust=True)


def test_the_engine_reads_of_the_extra_arguments_what_our_api_server_would() -> None:
    new, ignored = turn(
        agentic_context='{"program_id": "p", "expected_resume": false}', this_func_call="bash"
    )
    assert (new.fields.job_id, new.fields.is_last_step, new.fields.this_tool) == ("p", True, ("bash",))
    assert not ignored
    assert turn("native")[0].fields.job_id == "native"
    assert turn("native", job_id="ours")[0].fields.job_id == "ours"


def test_a_bad_value_is_counted_and_harms_no_engine() -> None:
    assert turn(job_id="")[1] == ["job_id"] and turn(agentic_context="[")[1] == ["agentic_context"]
    new, ignored = turn("x" * 300)
    assert new.fields.job_id is None and ignored == ["session_id"]


def test_a_client_cannot_say_itself_whose_it_is() -> None:
    assert turn("s", **{OWNER_FIELD: "somebody"})[0].fields.owner == ""


def test_a_named_request_for_one_token_is_a_turn_as_a_benchmarks_warm_up_is() -> None:
    new, _ = turn("s", max_tokens=1)
    assert new.fields.job_id == "s" and new.may_be_linked
    assert not turn(max_tokens=1)[0].may_be_linked


def test_several_api_keys_do_not_start_and_one_does() -> None:
    arguments = SimpleNamespace(host="", port=8000, api_key=["one"])
    assert rust_frontend.prepare(arguments, 0).port == 8000 + METRICS_PORT_OFFSET
    assert rust_frontend.prepare(arguments, 9).port == 9
    arguments.api_key = ["one", "two"]
    with pytest.raises(ConfigError, match="several API keys .* unset VLLM_USE_RUST_FRONTEND"):
        rust_frontend.prepare(arguments, 0)


def test_only_vllm_serve_has_it_and_a_script_with_the_variable_has_not(monkeypatch: Any) -> None:
    serves, script = SimpleNamespace(_api_process_rank=-1), SimpleNamespace(_api_process_rank=0)
    assert not rust_frontend.chosen(serves, headless=False)
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    assert rust_frontend.chosen(serves, headless=False) and rust_frontend.chosen(script, headless=True)
    assert not rust_frontend.chosen(script, headless=False)


@pytest.mark.parametrize(("version", "is_on"), [(RUST_VERSION, True), ('{"version": "0.32.0"}', False)])
def test_status_adds_the_figures_of_engines_behind_a_server_that_says_it_is_in_rust(
    command: Command, version: str, is_on: bool
) -> None:
    engine = page({'continuum_policy_info{policy="continuum"}': 1, "continuum_programs": 7})
    with metrics_server([engine]) as ours, metrics_server([page({"vllm:a": 1})], version) as front:
        said = command("status", front, "--metrics-port", ours.rpartition(":")[2]).out
    assert ("policy continuum, 7 programs known" in said) == is_on == ("stock vLLM" not in said)


# live ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rust")


@pytest.fixture(scope="module")
def rust(model: Path, folder: Path) -> Iterator[Server]:
    if not RUST_PATH:
        pytest.skip("this vLLM has no vllm-rs; VLLM_RUST_FRONTEND_PATH names that of its wheel for CUDA")
    with serve(model, ARGS, log=folder / "rust.log", env=RUST) as url:
        yield Server(url)


def engine_of(server: Server) -> Server:
    """Where the engine behind the Rust server shows its metrics."""
    host, _, port = server.url.rpartition(":")
    return Server(f"{host}:{int(port) + METRICS_PORT_OFFSET}")


def of_fields(headers: dict[str, str], body: dict[str, Any]) -> Client:
    return session(lambda agent, turn: completion(agent, turn, headers, **body))


SENDERS = CLIENTS | {name: of_fields(*sent) for name, sent in FIELDS.items()}
KEYS = {name: f"key-{number}" for number, name in enumerate(SENDERS)}  # some have the same sessions' names


def named_turns(server: Server, metrics: Server, keys: Mapping[str, str]) -> dict[str, int]:
    """By client, and by field: of three turns of its parent, those for which a program was found."""
    found = {}
    for name, client in SENDERS.items():
        before = metrics.metric("continuum_ttl_decisions_total")
        for each in (each for each in client.turns if each.agent == PARENT):
            own = {"max_output_tokens" if each.path == "/v1/responses" else "max_tokens": 4}
            body = {**each.body, "model": "tiny", "stream": False, **own}
            headers = {k: v for k, v in each.headers.items() if k != "authorization"}
            headers |= {"authorization": f"Bearer {keys[name]}"} if keys else {}
            HTTP.post(server.url + each.path, json=body, headers=headers)
        time.sleep(0.6)  # so old may figures be
        found[name] = round(metrics.metric("continuum_ttl_decisions_total") - before)
    return found


def agentx_chat(story: int, turn: int) -> list[dict[str, str]]:
    """As AgentX's harness fills a trace: a message loses its end when the next turn comes."""
    text = f"{story} is this session. " + "The tests of the parser fail again, see its lines. " * 9
    messages = [{"role": "user", "content": text}]
    for number in range(1, turn):
        messages.append({"role": "assistant", "content": f"I read part {number} of it."})
        messages.append({"role": "user", "content": f"Its part {number} has no error that I see. " * 4})
    messages[-1]["content"] += f"These {turn} words, which no later prompt has."
    return messages


def agentx_turns(server: Server, metrics: Server, key: str = "") -> int:
    """Of two sessions of four turns under the harness' default header: those that were a program's."""

    def send(messages: list[dict[str, str]], correlation: str) -> None:
        headers = {"X-Correlation-ID": correlation} | ({"authorization": f"Bearer {key}"} if key else {})
        body = {"model": "tiny", "messages": messages, "max_tokens": 4}
        HTTP.post(f"{server.url}/v1/chat/completions", json=body, headers=headers).raise_for_status()

    send([{"role": "user", "content": "How are prompts closed here? " * 30}], "another client")
    before = metrics.metric("continuum_ttl_decisions_total")
    for turn in range(1, 5):
        for story in range(2):
            send(agentx_chat(story, turn), f"c-{story}")
    time.sleep(0.6)  # so old may figures be
    return round(metrics.metric("continuum_ttl_decisions_total") - before)


@pytest.mark.real
def test_every_later_turn_of_agentx_is_its_sessions_by_its_text_alone(rust: Server) -> None:
    """The Rust server drops X-Correlation-ID."""
    assert agentx_turns(rust, engine_of(rust)) == 2 * 3


@pytest.mark.real
def test_three_turns_of_each_client_arrive_named_by_what_the_rust_server_passes_on(rust: Server) -> None:
    found = named_turns(rust, engine_of(rust), {})
    print(json.dumps(found))
    assert {name for name, turns in found.items() if turns == 3} == BOTH, json.dumps(found)


@pytest.mark.real
def test_the_same_turns_arrive_named_by_the_python_server(model: Path, folder: Path) -> None:
    if not RUST_PATH:
        pytest.skip("the other half of the comparison with vllm-rs")
    with serve(model, [*ARGS, "--api-key", *KEYS.values()], log=folder / "python.log") as url:
        found = named_turns(Server(url), Server(url), KEYS)
        of_agentx = agentx_turns(Server(url), Server(url), KEYS["AgentX"])
    print(json.dumps(found))
    assert of_agentx == 2 * 3
    assert set(found) - {name for name, turns in found.items() if turns == 3} == UNNAMED, json.dumps(found)


@pytest.mark.real
def test_status_finds_the_figures_of_the_engine_behind_it(rust: Server, command: Command) -> None:
    rust.complete(ids(300), vllm_xargs={"job_id": "a"})
    ran = command("status", rust.url)
    assert "continuum is on: policy continuum" in ran.out and "stock vLLM" not in ran.out


@pytest.mark.real
def test_its_start_says_in_one_line_what_it_cannot_carry(rust: Server, folder: Path) -> None:
    said = [line for line in (folder / "rust.log").read_text().splitlines() if "name programs" in line]
    assert (
        len(said) == 1 and "vllm_xargs" in said[0] and str(engine_of(rust).url.rpartition(":")[2]) in said[0]
    )
