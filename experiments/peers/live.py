"""The peers on a real server: vLLM's options, and the router in front of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from experiments.peers import settings
from experiments.peers.install import ENGINE, ROUTER
from experiments.server import begun, reserved_port, stop, wait_until_healthy
from experiments.sim.step_time import Machine
from experiments.sweep.cases import AGENTINFER, ROUTER_WARM
from experiments.workload import Program

ROOT = Path(__file__).resolve().parents[2]
BRIDGE = "agentinfer.agentcache.core.scheduler.AgentCacheSyncSchedulerBridge"  # vLLM is not async on a CPU


def profiled(profile: str) -> Machine:
    """The machine of a file in profiles/."""
    return Machine.from_profile(yaml.safe_load((ROOT / "profiles" / profile).read_text()), profile)


def served(contender: str, profile: str) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of `vllm serve` for that peer."""
    if contender != AGENTINFER:
        return ["--enable-prompt-tokens-details"], {}  # the router reads how much was cached
    config = json.dumps({"agentcache": settings.agentinfer(profiled(profile))})
    path = os.pathsep.join(filter(None, [str(ENGINE), os.environ.get("PYTHONPATH", "")]))
    return ["--scheduler-cls", BRIDGE, "--additional-config", config], {"PYTHONPATH": path}


@contextmanager
def router(contender: str, profile: str, capacity_tokens: int, worker: str, log: Path) -> Iterator[str]:
    """A vllm-router in front of `worker`, a base URL; its own base URL. Raises ServerError."""
    port, window = reserved_port(), settings.WARM_WINDOW if contender == ROUTER_WARM else None
    config = settings.router(profiled(profile), capacity_tokens, window)
    command = [str(ROUTER), "--host", "127.0.0.1", "--port", str(port), "--worker-urls", worker]
    command += ["--prometheus-port", str(reserved_port()), "--policy", "consistent_hash"]
    command += ["--worker-startup-check-interval", "1", "--enable-program-scheduling"]
    command += ["--program-scheduling-config-json", json.dumps(config)]
    process = begun(command, os.environ, log)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(url, process, log, 60.0, "vllm-router")
        yield url
    finally:
        stop(process)


def identity(program: Program, number: int) -> Mapping[str, Any]:
    """The fields of turn `number` for a peer, in place of this project's."""
    context = settings.agentic_context(program.program_id, number == len(program.turns))
    return {"vllm_xargs": {"agentic_context": context}}
