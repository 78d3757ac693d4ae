"""The card's command, but for its ports and sizes, with a real mini-swe-agent, unmodified, and real bash.

One `vllm serve` starts LMCache's server, and a second one uses it. The random model is made to answer with a
valid bash block by a structured-output regex over a few fast and slow commands. Some agents name their
program by job_id, as that agent's clients do (`model_kwargs`), some by a header that others send, some not.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from serving import CHUNK_GIB, HTTP, Server, ids, serve
from waiting import wait_for

from connectors.lmcache_mp.server.command_line import leftover_pool, shm_name
from continuum_lmcache.tools.durations import ToolDurations
from experiments.server import ROOT, reserved_port

pytestmark = pytest.mark.real

PROMPTS = [ids(832, seed) for seed in range(1, 4)]  # 3 chunks and a half block
SHIPPED = json.loads((ROOT / "lmcache.json").read_text())
COMMANDS = ("ls -l", "echo done", "sleep 0.5", "sleep 0.5 && ls", "cd / && python3 -c pass")
STEPS = 16
PROGRAMS = 8


@dataclass(frozen=True)
class First(Server):
    """The server that the command starts, and the port of LMCache's server."""

    folder: Path
    lmcache_port: int


def arguments(folder: Path, connector: str, extra: dict[str, Any]) -> list[str]:
    """vLLM's, with the repository's file for another connector or with other settings."""
    path = folder / f"{connector}.json"
    path.write_text(json.dumps(SHIPPED | {"kv_connector": connector, "kv_connector_extra_config": extra}))
    args = ["--kv-transfer-config", str(path), "--scheduling-policy", "continuum"]
    return [*args, "--max-model-len", "6144", "--num-gpu-blocks-override", "60"]


@pytest.fixture(scope="module")
def first(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[First]:
    """With the sizes of LMCache's variables. What it started and learned is looked at when it has ended."""
    folder, port = tmp_path_factory.mktemp("card"), reserved_port()
    yaml = folder / "lmcache.yaml"
    yaml.write_text("save_decode_cache: true\nlocal_device: cpu\n")
    env = {
        "LMCACHE_LOCAL_CPU": "true",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": str(60 * CHUNK_GIB),
        "LMCACHE_LOCAL_DISK": f"file://{folder}/kv/deep/",
        "LMCACHE_MAX_LOCAL_DISK_SIZE": "1",
        "LMCACHE_CHUNK_SIZE": "256",
        "LMCACHE_CONFIG_FILE": str(yaml),
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        "RUN_OUTPUT_DIR": str(folder / "run"),
        "CONTINUUM_TOOL_DURATIONS_FILE": str(folder / "gaps.json"),
        "CONTINUUM_RECORD_IDS": "true",
    }
    extra = SHIPPED["kv_connector_extra_config"] | {"lmcache.mp.port": port}
    args = arguments(folder, "LMCacheMPConnector", extra)
    with serve(model, args, log=folder / "server.log", env=env) as url:
        yield First(url, folder, port)
        assert leftover_pool(shm_name(port)).exists()
    wait_for(lambda: not servers_at(port), "LMCache's server is gone")
    assert not leftover_pool(shm_name(port)).exists()
    learned = ToolDurations.loads((folder / "gaps.json").read_text()).exact(("bash",)).n
    assert learned > 50 or not any(folder.glob("work-*")), "durations survive a restart"


def servers_at(port: int) -> list[psutil.Process]:
    """LMCache's servers at this port; a process that is gone has no command line."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "lmcache.v1.multiprocess.http_server" in words and str(port) in words:
            found.append(process)
    return found


def from_dram(server: Server) -> float:
    return server.metric("continuum_prompt_tokens_total", tier="dram")


def reloads(server: Server) -> bool:
    """Whether all prompts come from DRAM once the GPU has lost them; LMCache stores them some time after."""
    reset = f"{server.url}/reset_prefix_cache"
    HTTP.post(reset).raise_for_status()  # ends pins
    server.usage_becomes(0.0)
    HTTP.post(reset).raise_for_status()
    before = from_dram(server)
    for prompt in PROMPTS:
        server.complete(prompt, is_last_step=True)
    return from_dram(server) - before >= len(PROMPTS) * 3 * 256


def test_one_command_starts_lmcaches_server_and_a_second_engine_shares_it(
    first: First, model: Path, tmp_path: Path
) -> None:
    """The second engine's file is one for LMCache in one process. It computes a prompt if LMCache's server,
    on a machine with other work, is too slow to answer: so it has more than one to find."""
    (process,) = servers_at(first.lmcache_port)
    log, disk = first.folder / "server.log", first.folder / "kv" / "deep"
    said = next(line for line in log.read_text().splitlines() if "LMCache's server on port" in line)
    assert said.count(f'"base_path": "{disk}/"') == 1 and "--chunk-size 256" in said
    assert "without effect: local_device" in said
    outputs = [first.complete(prompt, is_last_step=True).output for prompt in PROMPTS]
    wait_for(lambda: reloads(first), "a load from DRAM", every_s=0.5)
    wait_for(lambda: any(disk.iterdir()), "something is on the disk")
    old = arguments(tmp_path, "LMCacheConnectorV1", {"lmcache.mp.port": first.lmcache_port})
    other_log = tmp_path / "second.log"
    with serve(model, old, log=other_log) as other_url:
        assert servers_at(first.lmcache_port) == [process]
        assert f"LMCache's server runs on port {first.lmcache_port} already" in other_log.read_text()
        other = Server(other_url)
        assert other.metric("continuum_policy_info", policy="continuum") == 1, "before the first request"
        found = [other.complete(prompt, is_last_step=True).output for prompt in PROMPTS]
        assert found == outputs and from_dram(other) > 0, other_log.read_text()


# a real agent -----------------------------------------------------------------


@pytest.fixture(scope="module")
def recording(first: First) -> dict[str, Any]:
    """The events of eight agents' programs."""
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_SILENT_STARTUP": "1"}  # read at import
    os.environ |= {**quiet, "MSWEA_GLOBAL_CONFIG_DIR": str(first.folder)}
    with ThreadPoolExecutor(PROGRAMS) as pool:
        ends = list(pool.map(lambda n: run_agent(first, n), range(PROGRAMS)))
    assert set(ends) == {"LimitsExceeded"}, "an agent ended otherwise than by its step limit"
    (text,) = first.recordings(first.folder / "run" / "scheduler_timestamps")
    return {job: log for job, log in json.loads(text).items() if not job.startswith("_")}


def run_agent(first: First, number: int) -> str:
    """One program of STEPS turns; odd ones send no id. Returns how it ended."""
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

    commands = "|".join(map(re.escape, COMMANDS))
    body: dict[str, Any] = {"structured_outputs": {"regex": f"```mswea_bash_command\n({commands})\n```"}}
    headers: dict[str, str] = {}
    if number % 4 == 0:
        body["job_id"] = f"agent-{number}"
    elif number % 2 == 0:
        headers["thread-id"] = f"agent-{number}"  # as Codex names its programs
    workspace = first.folder / f"work-{number}"
    workspace.mkdir()
    model = LitellmTextbasedModel(
        model_name="openai/tiny",
        model_kwargs={
            "api_base": f"{first.url}/v1",
            "api_key": "none",
            "temperature": 1.0,
            "max_tokens": 60,
            "extra_body": body,
            "extra_headers": headers,
        },
        cost_tracking="ignore_errors",
    )
    agent = DefaultAgent(
        model,
        LocalEnvironment(cwd=str(workspace)),
        system_template="You answer with one bash block. " * 30,
        instance_template=f"Task {number}: {{{{task}}}}",
        step_limit=STEPS,
        cost_limit=0,
    )
    return str(agent.run("look around")["exit_status"])


def events(recording: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [event for log in recording.values() for event in log if name in event]


def test_programs_with_and_without_an_id_and_their_tools_are_recognised(recording: dict[str, Any]) -> None:
    named = {job for job in recording if job.startswith("agent-")}
    assert len(named) == PROGRAMS / 2
    assert len(recording) == PROGRAMS, "programs that named nothing were linked by their prompts"
    tools = [event["tool"] for event in events(recording, "Request_departure_time")]
    known = [tuple(tool)[-2] for tool in tools if tool]
    assert len(tools) == PROGRAMS * STEPS - PROGRAMS / 2, "all but the first turns that named no program"
    assert len(known) >= 0.95 * len(tools)
    assert {"ls", "echo", "sleep", "python"} >= set(known)


def test_durations_are_learned_and_differ_by_tool(recording: dict[str, Any]) -> None:
    gaps = defaultdict(list)
    for log in recording.values():
        for tool, gap_s in tool_gaps(log):
            gaps[tool].append(gap_s)
    assert min(gaps["ls"]) < min(gaps["sleep"]) >= 0.5  # the quickest: a busy machine lengthens the others


def tool_gaps(log: list[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """(command, seconds) of each tool call that was followed by another turn."""
    left: dict[str, Any] | None = None
    for event in log:
        if "Request_departure_time" in event and event["tool"]:
            left = event
        elif "Request_arrival_time" in event and left is not None:
            yield left["tool"][-2], event["Request_arrival_time"] - left["Request_departure_time"]
            left = None


def test_every_pause_was_decided_and_the_decision_says_why(recording: dict[str, Any]) -> None:
    decisions = [e["retention"] for e in events(recording, "Request_departure_time") if e["retention"]]
    assert len(decisions) >= PROGRAMS * STEPS - PROGRAMS
    levels = [d["level"] for d in decisions]
    assert "cold" in levels and set(levels) > {"cold"}, "the cold start was left behind"
    assert all(d["policy"] == "continuum" and d["samples"] >= 0 for d in decisions)
