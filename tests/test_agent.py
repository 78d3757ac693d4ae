"""A real mini-swe-agent, unmodified, with real bash, against the real server.

The random model is made to answer with a valid bash block by a structured-output regex over a few
fast and slow commands. Some programs name themselves by job_id, as that agent's clients do
(`model_kwargs`), some by a header that other agents send, some name nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import statistics
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from serving import serve
from waiting import wait_for

from continuum_lmcache.tools.durations import ToolDurations

pytestmark = pytest.mark.real

COMMANDS = ("ls -l", "echo done", "sleep 0.5", "sleep 0.5 && ls", "cd / && python3 -c pass")
STEPS = 16
PROGRAMS = 8


@pytest.fixture(scope="module")
def recording(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The recording of eight agents; the server is stopped by SIGTERM."""
    folder = tmp_path_factory.mktemp("agent")
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_SILENT_STARTUP": "1"}  # read at import
    os.environ |= {**quiet, "MSWEA_GLOBAL_CONFIG_DIR": str(folder)}
    args = ["--max-model-len", "6144", "--num-gpu-blocks-override", "60", "--scheduling-policy", "continuum"]
    env = {"RUN_OUTPUT_DIR": str(folder / "run"), "CONTINUUM_TOOL_DURATIONS_FILE": str(folder / "gaps.json")}
    env["CONTINUUM_RECORD_IDS"] = "true"
    with (
        serve(model, args, log=folder / "server.log", env=env) as url,
        ThreadPoolExecutor(PROGRAMS) as pool,
    ):
        ends = list(pool.map(lambda n: run_agent(url, folder, n), range(PROGRAMS)))
        on_demand(folder / "run" / "scheduler_timestamps")
    assert set(ends) == {"LimitsExceeded"}, "an agent ended otherwise than by its step limit"
    yield json.loads((folder / "run" / "scheduler_timestamps").read_text())
    learned = ToolDurations.loads((folder / "gaps.json").read_text())
    assert learned.exact(("bash",)).n > 50, "durations survive a restart"


def on_demand(path: Path) -> None:
    """SIGUSR1 to the engine's process writes the recording while it runs."""
    assert not path.exists()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # an earlier test's, dead by now
            if "EngineCore" in " ".join(process.cmdline()):
                process.send_signal(signal.SIGUSR1)
    wait_for(path.exists, "a recording after SIGUSR1", every_s=0.1)


def run_agent(url: str, folder: Path, number: int) -> str:
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
    workspace = folder / f"work-{number}"
    workspace.mkdir()
    model = LitellmTextbasedModel(
        model_name="openai/tiny",
        model_kwargs={
            "api_base": f"{url}/v1",
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
    return [e for job, log in recording.items() if not job.startswith("_") for e in log if name in e]


def test_programs_are_recorded_with_and_without_an_id(recording: dict[str, Any]) -> None:
    jobs = {job for job in recording if not job.startswith("_")}
    named = {job for job in jobs if job.startswith("agent-")}
    assert len(named) == PROGRAMS / 2
    assert len(jobs - named) == PROGRAMS / 2, "programs that named nothing were linked by their prompts"


def test_the_tools_in_the_bash_blocks_are_recognised(recording: dict[str, Any]) -> None:
    tools = [event["tool"] for event in events(recording, "Request_departure_time")]
    known = [tuple(tool)[-2] for tool in tools if tool]
    assert len(tools) == PROGRAMS * STEPS - PROGRAMS / 2, "all but the first turns that named no program"
    assert len(known) >= 0.95 * len(tools)
    assert {"ls", "echo", "sleep", "python"} >= set(known)


def test_durations_were_learned_and_differ_by_tool(recording: dict[str, Any]) -> None:
    gaps = defaultdict(list)
    for job, log in recording.items():
        if not job.startswith("_"):
            for tool, gap_s in tool_gaps(log):
                gaps[tool].append(gap_s)
    medians = {tool: statistics.median(found) for tool, found in gaps.items()}
    print({tool: (len(gaps[tool]), round(median, 3)) for tool, median in medians.items()})
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
    assert levels[0] == "cold" and set(levels) > {"cold"}, "the cold start was left behind"
    assert all(d["policy"] == "continuum" and d["samples"] >= 0 for d in decisions)
    print("TTLs > 0:", sorted(round(d["ttl_s"], 3) for d in decisions if d["ttl_s"] > 0))
