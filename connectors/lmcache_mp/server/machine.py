"""Whether this machine can hold the LMCache server that an engine would start: ports, memory, disk.

Asked before vLLM loads a model; LMCache's server itself would end minutes later, with a traceback.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import zmq
from lmcache.integration.vllm.mp_server_launcher import is_mp_server_autostart_enabled, is_mp_server_healthy
from lmcache.v1.platform import current_device_spec
from vllm.logger import init_logger

from connectors.lmcache_mp.server.command_line import HOST, leftover_pool, shm_name
from connectors.lmcache_mp.server.parent import LISTENING, owners_of_sockets
from connectors.lmcache_mp.translation import parse_server_args, port_of
from continuum_lmcache.capacity.kv_budget import GIB
from continuum_lmcache.connector_names import SERVER_ARGS
from continuum_lmcache.errors import ConfigError

logger = init_logger("vllm.continuum.lmcache")
ANSWER_S = 5.0  # a server may be busy


def check_machine(extra: Mapping[str, Any]) -> bool:
    """Whether LMCache's server runs already. Raises ConfigError if a new one cannot start on this machine."""
    if not is_mp_server_autostart_enabled(extra):
        return True
    port = port_of(extra)
    if others := owners_of_sockets(port, LISTENING) - {os.getuid()}:
        raise ConfigError(
            f"port {port} is another user's (uid {min(others)}), and LMCache's server there would hold this "
            "engine's KV; set lmcache.mp.port to a port of your own"
        )
    if _is_taken(port):
        if is_mp_server_healthy(f"tcp://{HOST}:{port}", zmq.Context.instance(), ANSWER_S):
            return True
        raise ConfigError(
            f"port {port} is taken by something that does not answer as LMCache's server; stop it, or set "
            "lmcache.mp.port to another one"
        )
    args, others_args = parse_server_args(extra)
    if _is_taken(args.http_port):
        raise ConfigError(
            f"port {args.http_port}, for HTTP of LMCache's server, is taken; put --http-port with another "
            f"one into {SERVER_ARGS}"
        )
    in_shm = args.shm_name and (not current_device_spec.is_pin_supported or "--no-l1-use-lazy" in others_args)
    check_l1(args.l1_size_gb or 0.0, leftover_pool(shm_name(port)) if in_shm else None)
    for adapter in args.l2_adapter:
        if folder := adapter.get("base_path"):
            check_disk(Path(folder), adapter.get("max_capacity_gb") or 0.0)
    return False


def check_l1(l1_gib: float, pool: Path | None) -> None:
    """`pool`: L1's shared memory, of which a killed server may have left one. Raises ConfigError."""
    rooms = {"the machine's memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")}
    with contextlib.suppress(OSError, ValueError):  # no limit, which is "max"
        rooms["this container's memory"] = int(Path("/sys/fs/cgroup/memory.max").read_text())
    if pool is not None:
        left_bytes = pool.stat().st_blocks * 512 if pool.exists() else 0
        rooms["the free part of /dev/shm"] = shutil.disk_usage(pool.parent).free + left_bytes
    for name, room_bytes in rooms.items():
        if l1_gib * GIB > room_bytes:
            raise ConfigError(
                f"LMCache's L1 of {l1_gib:g} GiB is larger than {name}, {room_bytes / GIB:.1f} GiB; lower "
                f"LMCACHE_MAX_LOCAL_CPU_SIZE, or --l1-size-gb in {SERVER_ARGS}"
            )


def check_disk(folder: Path, size_gib: float) -> None:
    """Makes the folder. Raises ConfigError if L2 cannot be there; warns if there is less room now."""
    setting = f"LMCACHE_LOCAL_DISK, or base_path in {SERVER_ARGS}"
    try:
        with private_files():
            folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(
            f"LMCache's disk folder {folder} cannot be written ({error.strerror}); correct {setting}"
        ) from error
    disk, kept = shutil.disk_usage(folder), sum(file.stat().st_size for file in folder.glob("*.data"))
    size = "LMCACHE_MAX_LOCAL_DISK_SIZE, or max_capacity_gb"
    if size_gib * GIB > disk.total:
        raise ConfigError(
            f"LMCache's disk of {size_gib:g} GiB is larger than the file system of {folder}, "
            f"{disk.total / GIB:.2f} GiB; lower {size}, or correct {setting}"
        )
    if size_gib * GIB > disk.free + kept:
        text = "LMCache's disk folder %s has room for %.2f GiB, not for %g; it is used as that; lower %s"
        logger.warning(text, folder, (disk.free + kept) / GIB, size_gib, size)


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
