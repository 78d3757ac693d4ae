"""What surrounds the start of LMCache's server by an engine's first worker.

LMCache 0.5.6's launcher (mp_server_launcher.py) starts one if none answers at the address. Here engines that
start at the same time do so one after the other, and the server sees all of the machine's GPUs, for the
engines that come later. What it writes is its user's alone, and it ends soon after its engine was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import zmq
from lmcache.integration.vllm.mp_server_launcher import is_mp_server_autostart_enabled, is_mp_server_healthy
from vllm.logger import init_logger

from connectors.lmcache_mp.server.command_line import leftover_pool, shm_name
from connectors.lmcache_mp.server.machine import check_machine, private_files
from connectors.lmcache_mp.server.parent import STARTED_BY
from connectors.lmcache_mp.settings import server_urls
from connectors.lmcache_mp.translation import port_of
from continuum_lmcache.errors import ConfigError, ServerError

logger = init_logger("vllm.continuum.lmcache")
LOCK_S = 120.0  # LMCache waits 90 s for a server to start
START_S = 60.0  # and may start at the same time as vLLM
GPUS = "CUDA_VISIBLE_DEVICES"


@contextlib.contextmanager
def one_start(extra: Mapping[str, Any], is_first_worker: bool) -> Iterator[None]:
    """While this lasts, no other engine of this user starts a server at the same port.

    `is_first_worker`: of its engine; only that one starts a server. Raises ConfigError, ServerError.
    """
    if not is_first_worker or not is_mp_server_autostart_enabled(extra):
        yield
        return
    port, gpus = port_of(extra), len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    with locked(port), private_files():
        if check_machine(extra):
            logger.info("LMCache's server runs on port %d already; it is used, with its own sizes", port)
        else:
            leftover = leftover_pool(shm_name(port))
            try:
                leftover.unlink(missing_ok=True)  # no server has the port, so none has the memory
            except OSError as error:
                raise ConfigError(
                    f"{leftover}, an LMCache server's shared memory, cannot be removed ({error.strerror}); "
                    "set lmcache.mp.port to another port"
                ) from error
        try:
            with variables(all_gpus(gpus) | {STARTED_BY: str(os.getpid())}):
                yield
        except ConnectionError as error:
            raise ServerError(f"LMCache's server did not start, and said why above: {error}") from error


@contextlib.contextmanager
def locked(port: int) -> Iterator[None]:
    """Hold this user's lock of a port; wait for it LOCK_S. Raises ConfigError, ServerError."""
    path = Path(tempfile.gettempdir(), f"continuum-lmcache-{os.getuid()}-{port}.lock")
    theirs = ConfigError(
        f"{path}, by which only one engine at a time starts LMCache's server, is not this user's own "
        "file; remove it, or set TMPDIR to a folder of your own"
    )
    try:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    except OSError:
        raise theirs from None
    with file:
        if os.fstat(file.fileno()).st_uid != os.getuid():
            raise theirs
        end_s, told = time.monotonic() + LOCK_S, False
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if not told:
                logger.info("Another engine starts LMCache's server on port %d; this one waits for it", port)
            if time.monotonic() > end_s:
                raise ServerError(
                    f"another process has held {path} for {LOCK_S:.0f} s, as if it started LMCache's server; "
                    "end it, or set lmcache.mp.port to another port"
                )
            told = True
            time.sleep(0.2)
        yield


def find_server(extra: Mapping[str, Any]) -> None:
    """Wait for a server that somebody else starts, maybe at the same time. Raises ConfigError."""
    if is_mp_server_autostart_enabled(extra):
        return
    given = server_urls(extra.get("lmcache.mp.server_urls") or "")
    url = given[0] if given else f"{extra.get('lmcache.mp.host', 'localhost')}:{port_of(extra)}"
    url = url if "://" in url else f"tcp://{url}"
    if url.startswith("tcp:") and not is_mp_server_healthy(url, zmq.Context.instance(), START_S):
        raise ConfigError(
            f"no LMCache server has answered at {url} for {START_S:.0f} s; start one (docs/lmcache.md), "
            "correct lmcache.mp.host or lmcache.mp.port, or set lmcache.mp.autostart to true"
        )


def all_gpus(count: int) -> dict[str, str]:
    """The variable that shows a process all `count` GPUs of the machine, this process's own first.

    A server that sees only the first engine's GPUs could not copy to those of a second engine.
    """
    own = [one.strip() for one in os.environ.get(GPUS, "").split(",")]
    if not all(one.isdecimal() for one in own):  # none is hidden, or they have names
        return {}
    return {GPUS: ",".join([*own, *(str(n) for n in range(count) if str(n) not in own)])}


@contextlib.contextmanager
def variables(shown: Mapping[str, str]) -> Iterator[None]:
    """Show processes that are started meanwhile these environment variables."""
    before = {name: os.environ.get(name) for name in shown}
    os.environ.update(shown)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
