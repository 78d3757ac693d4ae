"""Starts a real `vllm serve`, and always stops it.

with serve(model, ["--scheduling-policy", "continuum"], log=Path("server.log")) as url: ...
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import httpx
import psutil

from profiles.cpu_environment import CPU_ENV

ROOT = Path(__file__).parents[1]
CPU_FLAGS = Path("/proc/cpuinfo")
BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # the last is ARM's
CPU_ARGS = ("--enforce-eager", "--dtype", "bfloat16", "--seed", "0")
GPU_ENV = {name: value for name, value in CPU_ENV.items() if "CPU" not in name}
GPU_ARGS = ("--dtype", "bfloat16", "--seed", "0")

_RESERVED: list[socket.socket] = []  # bound and not listened on; a server may come back to its place


class ServerError(RuntimeError):
    """The server died or did not answer in time. The message ends with its log's last lines."""


def fast_dtype() -> str:
    """The dtype of a server that is timed: bfloat16 if the CPU has instructions for it.

    Elsewhere torch emulates it: on a Xeon without them a product takes four times as long as in float32.
    Float32 also where the system does not list its CPU's instructions.
    """
    return "bfloat16" if BFLOAT16_FLAGS & cpu_flags() else "float32"


def cpu_flags() -> set[str]:
    """The names of this CPU's instruction sets; none where the system does not list them."""
    return set(CPU_FLAGS.read_text().split()) if CPU_FLAGS.exists() else set()


def reserved_port() -> int:
    """A TCP port that no other process gets while this one lives, nor the next one, where LMCache's server
    has HTTP. A server takes seconds before it listens: meanwhile another one could take a free port.
    """
    while True:
        held = [socket.socket(), socket.socket()]
        with contextlib.suppress(OSError):  # the next one is taken
            for number, each in enumerate(held):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # kept for a server that binds it
                each.bind(("127.0.0.1", number and held[0].getsockname()[1] + 1))
            _RESERVED.extend(held)
            return int(held[0].getsockname()[1])


def unwind_on_sigterm() -> None:
    """Make SIGTERM unwind this process as ^C does, so that code that started servers stops them.

    Left alone: a process that handles the signal already, and threads beside the main one.
    """
    ours = threading.current_thread() is threading.main_thread()
    if ours and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


@contextlib.contextmanager
def serve(
    model: Path,
    args: Sequence[str] = (),
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    name: str = "tiny",
    start_s: float = 600.0,
    on_gpu: bool = False,
    vllm: Sequence[str] = (),
) -> Iterator[str]:
    """Serve `model` as `name` and yield the base URL (without /v1) once it is healthy.

    `on_gpu`: with vLLM's own compilation and CUDA graphs, which a CPU server here goes without.
    `vllm`: the command in place of the installed `vllm`.
    Raises ServerError with the log's tail if it exits first or is not up within `start_s`.
    """
    unwind_on_sigterm()
    port = reserved_port()
    always, settings = (GPU_ARGS, GPU_ENV) if on_gpu else (CPU_ARGS, CPU_ENV)
    command = [*(vllm or script("vllm", "vllm.entrypoints.cli.main")), "serve", str(model)]
    command += ["--served-model-name", name, "--host", "127.0.0.1", "--port", str(port), *always, *args]
    inherited = {k: v for k, v in os.environ.items() if k != "PROMETHEUS_MULTIPROC_DIR"}  # not ours to add to
    process = begun(command, {**inherited, **settings, **(env or {})}, log)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(url, process, log, start_s)
        yield url
    finally:
        stop(process)


def begun(
    command: Sequence[str], environment: Mapping[str, str], log: Path, mode: Literal["w", "a"] = "w"
) -> subprocess.Popen[bytes]:
    """A server of this checkout, with its output in `log`. Its workers die with it, by process group."""
    log.parent.mkdir(parents=True, exist_ok=True)
    env = with_checkout(environment)
    with log.open(mode) as out:
        return subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)


def with_checkout(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with this checkout first on Python's path: figures name its commit, so the servers run
    its plugin and not the one that is installed."""
    path = filter(None, [str(ROOT), environment.get("PYTHONPATH")])
    return {**environment, "PYTHONPATH": os.pathsep.join(path)}


def script(name: str, module: str) -> list[str]:
    """The command `name` of this Python's environment; for unpacked wheels, which have none, `python -m`."""
    installed = Path(sys.executable).with_name(name)
    return [str(installed)] if installed.exists() else [sys.executable, "-m", module]


def processes(url: str) -> list[psutil.Process]:
    """A server that `serve` started here: its API server, and behind it the engine and its worker."""
    port = url.rpartition(":")[2]
    live = [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
    (front,) = [p for p in live if port in p.cmdline()]
    return [front, *front.children(recursive=True)]


def wait_until_healthy(
    url: str,
    process: subprocess.Popen[bytes],
    log: Path,
    start_s: float,
    name: str = "vllm serve",
    path: str = "/health",
    is_up: Callable[[httpx.Response], bool] = lambda answer: answer.is_success,
) -> None:
    """Return when its answer `is_up`; raise ServerError if the process ends or time runs out."""
    end_s = time.monotonic() + start_s
    with httpx.Client(timeout=5) as client:  # httpx.get would read the system's certificates at every call
        while time.monotonic() < end_s:
            if process.poll() is not None:
                raise ServerError(f"{name} exited with {process.returncode}:\n{tail(log)}")
            with contextlib.suppress(httpx.TransportError):
                if is_up(client.get(url + path)):
                    return
            time.sleep(0.25)
    raise ServerError(f"{name} was not healthy after {start_s:.0f} s:\n{tail(log)}")


def stop(process: subprocess.Popen[bytes], patience_s: float = 20.0, first: int = signal.SIGTERM) -> None:
    """SIGTERM, as an operator would, or another signal; then SIGKILL to the rest of its group."""
    if process.poll() is None:
        process.send_signal(first)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def tail(log: Path, lines: int = 30) -> str:
    """The end of a log file."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
