"""Starts a fleet on Ray Serve on this machine's CPUs, and always stops all of it (docs/ray.md).

with serve_fleet(model, folder) as url: ...
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from experiments.server import CPU_ENV, ServerError, reserved_port, tail, unwind_on_sigterm, with_checkout

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {
    **CPU_ENV,
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several replicas share the cores
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # listen on 127.0.0.1 alone
    "RAY_USAGE_STATS_ENABLED": "0",
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
    environment = with_checkout({**os.environ, **ENVIRONMENT})
    environment.pop("RAY_ADDRESS", None)
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", "from ray.serve.scripts import cli; cli()", "run", str(path)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for_replicas(url, page["applications"][0]["args"]["replicas"], start_s, process, log)
        yield url
    finally:
        stop(process)


def wait_for_replicas(
    url: str, replicas: int, start_s: float, process: subprocess.Popen[bytes] | None, log: Path
) -> None:
    """Return when all replicas have reported; raise ServerError if the process ends or time runs out."""
    end_s = time.monotonic() + start_s
    while time.monotonic() < end_s:
        if process is not None and process.poll() is not None:
            raise ServerError(f"serve run exited with {process.returncode}:\n{tail(log)}")
        if len(fleet_report(url).get("replicas", ())) >= replicas:
            return
        time.sleep(0.5)
    raise ServerError(f"{replicas} replicas were not up after {start_s:.0f} s:\n{tail(log)}")


def fleet_report(url: str) -> dict[str, Any]:
    """GET /fleet; {} if there is no answer now."""
    with contextlib.suppress(httpx.TransportError, ValueError):
        answer = httpx.get(f"{url}/fleet", timeout=30)
        if answer.is_success:
            found: dict[str, Any] = answer.json()
            return found
    return {}


def stop(process: subprocess.Popen[bytes], patience_s: float = 60.0) -> None:
    """SIGINT, as ^C, which lets Ray end its processes; SIGKILL to those that are left."""
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended and was waited for
        below = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
        _, left = psutil.wait_procs(below, timeout=10)
        for one in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
