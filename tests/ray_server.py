"""Starts a fleet on Ray Serve on this machine's CPUs, and always stops all of it (docs/fleet.md).

with serve_fleet(model, folder) as url: ...
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from experiments.server import CPU_ENV, begun, reserved_port, stop, unwind_on_sigterm, wait_until_healthy

ROOT = Path(__file__).resolve().parent.parent
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
ENVIRONMENT = {
    **CPU_ENV,
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several replicas share the cores
    LOOPBACK: "0",  # listen on 127.0.0.1 alone
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # Ray kills a proxy that needs more than 5 s, thrice
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_worker_niceness": "0",  # Ray's own 15: engines stand still while others compute on this machine
}
OPTIONS = (
    *("--served-model-name", "tiny", "--scheduling-policy", "continuum", "--enforce-eager", "--seed", "0"),
    *("--dtype", "float32", "--max-model-len", "4096", "--num-gpu-blocks-override", "64"),
    "--enable-prompt-tokens-details",
)


def config(model: Path, port: int, args: dict[str, Any]) -> dict[str, Any]:
    """docs/ray.yaml for small replicas."""
    page: dict[str, Any] = yaml.safe_load((ROOT / "docs" / "ray.yaml").read_text())
    page["http_options"]["port"] = port
    ports = {"lmcache_port": reserved_port(), "lmcache_http_port": reserved_port()}
    small = {"model": str(model), "gpus": 0, "cpus": 0.5, "replicas": 2, "lmcache_gb": 1, **ports}
    page["applications"][0]["args"] = small | {"vllm": " ".join(OPTIONS)} | args
    return page


@contextlib.contextmanager
def serve_fleet(model: Path, folder: Path, start_s: float = 600.0, **args: Any) -> Iterator[str]:
    """Serve and yield the base URL (without /v1) once all replicas have reported. `args`: of app.py.

    Raises ServerError with the log's tail if it ends first or is not up within `start_s`.
    """
    unwind_on_sigterm()
    folder.mkdir(parents=True, exist_ok=True)
    port, path, log = reserved_port(), folder / "ray.yaml", folder / "ray.log"
    page = config(model, port, args)
    path.write_text(yaml.safe_dump(page))
    environment = {**os.environ, **ENVIRONMENT}
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, "-c", "from ray.serve.scripts import cli; cli()", "run", str(path)]
    process = begun(command, environment, log)
    replicas = page["applications"][0]["args"]["replicas"]

    def is_up(answer: httpx.Response) -> bool:
        return answer.is_success and len(answer.json().get("replicas", ())) >= replicas

    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(url, process, log, start_s, "serve run", "/fleet", is_up)
        yield url
    finally:
        stop_all(process)


def fleet_report(url: str) -> dict[str, Any]:
    """GET /fleet; {} if there is no answer now."""
    with contextlib.suppress(httpx.TransportError, ValueError):
        answer = httpx.get(f"{url}/fleet", timeout=30)
        if answer.is_success:
            found: dict[str, Any] = answer.json()
            return found
    return {}


def stop_all(process: subprocess.Popen[bytes]) -> None:
    """SIGINT, as ^C, which lets Ray end its processes; SIGKILL to those that are left."""
    below: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended and was waited for
        below = psutil.Process(process.pid).children(recursive=True)
    stop(process, 60.0, signal.SIGINT)
    _, left = psutil.wait_procs(below, timeout=10)
    for one in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
