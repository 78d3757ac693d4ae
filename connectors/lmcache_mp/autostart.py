"""What is checked before an engine's first worker starts LMCache's server.

LMCache 0.5.6's launcher (mp_server_launcher.py) starts one if none answers at the address. Here engines that
start at the same time do so one after the other, a port that something else has is named, and the server sees
all of the machine's GPUs, for the engines that come later. What it writes is its user's alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import zmq
from lmcache.integration.vllm.mp_server_launcher import is_mp_server_autostart_enabled, is_mp_server_healthy
from vllm.logger import init_logger

from connectors.lmcache_mp.server.command_line import HOST, leftover_pool, shm_name
from connectors.lmcache_mp.settings import server_urls
from connectors.lmcache_mp.translation import parse_server_args, port_of
from continuum_lmcache.errors import ConfigError, ServerError

logger = init_logger("vllm.continuum.lmcache")
ANSWER_S = 10.0  # a server may be busy
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
    port = port_of(extra)
    lock = Path(tempfile.gettempdir(), f"continuum-lmcache-{os.getuid()}-{port}.lock")
    with lock.open("a") as held, private_files():
        fcntl.flock(held, fcntl.LOCK_EX)
        if not _is_running(port):
            _make_room(extra, port)
        try:
            with all_gpus(len(list(Path("/proc/driver/nvidia/gpus").glob("*")))):
                yield
        except ConnectionError as error:
            raise ServerError(f"LMCache's server did not start, and said why above: {error}") from error


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


def _is_running(port: int) -> bool:
    """Whether LMCache's server answers at the port. Raises ConfigError if something else has the port."""
    if not _is_taken(port):
        return False
    if not is_mp_server_healthy(f"tcp://{HOST}:{port}", zmq.Context.instance(), ANSWER_S):
        raise ConfigError(
            f"port {port} is taken by something that does not answer as LMCache's server; stop it, or set "
            "lmcache.mp.port to another one"
        )
    logger.info("LMCache's server runs on port %d already and is used as it is, with its own sizes", port)
    return True


def _make_room(extra: Mapping[str, Any], port: int) -> None:
    """What a new server needs: its other port, a folder for L2, and no shared memory of a killed server."""
    args, _ = parse_server_args(extra)
    if _is_taken(args.http_port):
        raise ConfigError(
            f"port {args.http_port}, for HTTP of LMCache's server, is taken; put --http-port with another "
            "one into lmcache.mp.autostart.server_args"
        )
    for adapter in args.l2_adapter:
        if folder := adapter.get("base_path"):
            Path(folder).mkdir(parents=True, exist_ok=True)
    leftover_pool(shm_name(port)).unlink(missing_ok=True)  # no server has the port, so none has the memory


def _is_taken(port: int) -> bool:
    with socket.socket() as asked:
        asked.settimeout(ANSWER_S)
        return asked.connect_ex((HOST, port)) == 0


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Let processes that are started meanwhile make files, such as L2's, for their own user alone."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


@contextlib.contextmanager
def all_gpus(count: int) -> Iterator[None]:
    """Show processes started meanwhile all `count` GPUs of the machine, this process's own first.

    A server that sees only the first engine's GPUs could not copy to those of a second engine.
    """
    mine = os.environ.get(GPUS, "")
    own = [one.strip() for one in mine.split(",")]
    if not all(one.isdecimal() for one in own):  # none is hidden, or they have names
        yield
        return
    os.environ[GPUS] = ",".join([*own, *(str(n) for n in range(count) if str(n) not in own)])
    try:
        yield
    finally:
        os.environ[GPUS] = mine
