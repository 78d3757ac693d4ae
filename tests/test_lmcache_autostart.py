"""LMCache's server as an engine starts it: several users and engines, kills, machines that are too small."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lmcache.integration.vllm.mp_server_launcher")

from waiting import wait_for

from connectors.lmcache_mp import autostart
from connectors.lmcache_mp.autostart import one_start
from connectors.lmcache_mp.server import machine
from connectors.lmcache_mp.server.command_line import leftover_pool, options, shm_name
from connectors.lmcache_mp.server.machine import check_machine
from connectors.lmcache_mp.server.parent import ESTABLISHED, LISTENING, STARTED_BY, owners_of_sockets
from continuum_lmcache.connector_names import AUTOSTART, SERVER_ARGS
from continuum_lmcache.errors import ConfigError, ServerError
from experiments.server import CPU_ENV, reserved_port

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")


def at(port: int, args: str = "--l1-size-gb 0.1", **more: Any) -> dict[str, Any]:
    return {AUTOSTART: True, "lmcache.mp.port": port, SERVER_ARGS: args, **more}


def refusal(extra: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as refused:
        check_machine(extra)
    assert "\n" not in str(refused.value)
    return str(refused.value)


# ---- several users


@as_root
def test_a_port_that_another_user_listens_at_is_refused() -> None:
    port = reserved_port()
    if not (other := os.fork()):
        os.setuid(NOBODY)
        _kept = socket.create_server(("127.0.0.1", port))
        signal.pause()
    try:
        wait_for(lambda: owners_of_sockets(port, LISTENING) == {NOBODY}, "the other user listens")
        said = refusal(at(port))
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
    assert f"port {port} is another user's (uid {NOBODY})" in said and "lmcache.mp.port" in said


def test_the_users_of_a_port_are_those_of_its_sockets() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert owners_of_sockets(port, LISTENING) == {os.getuid()}
        assert owners_of_sockets(port, ESTABLISHED) == set()
        with socket.create_connection(("127.0.0.1", port)):
            assert owners_of_sockets(port, ESTABLISHED) == {os.getuid()}
    assert owners_of_sockets(port, LISTENING) == set()


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lock file of a port that nobody uses."""
    monkeypatch.setattr(autostart.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path / f"continuum-lmcache-{os.getuid()}-{reserved_port()}.lock"


def start(lock: Path) -> None:
    with one_start(at(int(lock.stem.rpartition("-")[2])), True):
        pass


def test_an_engine_waits_for_another_ones_start_with_a_word_and_not_for_ever(
    lock: Path, monkeypatch: pytest.MonkeyPatch, logged: Callable[..., list[str]]
) -> None:
    monkeypatch.setattr(autostart, "LOCK_S", 0.5)
    said = logged(autostart, "info")
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ServerError, match=f"held {lock}.*lmcache.mp.port"):
            start(lock)
    assert len([line for line in said if "waits for it" in line]) == 1
    start(lock)


def test_a_lock_file_that_is_a_link_is_not_followed(lock: Path, tmp_path: Path) -> None:
    lock.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="TMPDIR"):
        start(lock)
    assert not (tmp_path / "elsewhere").exists()


@as_root
def test_a_lock_file_of_another_user_is_refused(lock: Path) -> None:
    lock.touch(0o666)
    os.chown(lock, NOBODY, NOBODY)
    with pytest.raises(ConfigError, match="not this user's own"):
        start(lock)


def test_the_shared_memory_of_users_with_one_port_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = shm_name(5555)
    monkeypatch.setattr(os, "getuid", lambda: NOBODY)
    assert shm_name(5555) != mine


# ---- a machine that is too small


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ("--l1-size-gb 900000", "LMCache's L1 of 900000 GiB is larger than the machine's memory"),
        ("""--l1-size-gb 0.1 --l2-adapter '{"base_path": "/proc/kv"}'""", "/proc/kv"),
        (
            """--l1-size-gb 0.1 --l2-adapter '{"base_path": "FOLDER", "max_capacity_gb": 9e6}'""",
            "larger than the file system of",
        ),
    ],
)
def test_what_the_machine_does_not_have_is_named_with_its_setting(
    args: str, reason: str, tmp_path: Path
) -> None:
    said = refusal(at(reserved_port(), args.replace("FOLDER", str(tmp_path / "new"))))
    assert reason in said and "LMCACHE_" in said


def test_an_l1_that_dev_shm_cannot_hold_is_refused_and_a_killed_servers_memory_counts_as_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = reserved_port()
    pool = leftover_pool(shm_name(port))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**26, total=2**27))
    assert "/dev/shm" in refusal(at(port))
    pool.write_bytes(bytes(2**26))
    try:
        assert check_machine(at(port)) is False
    finally:
        pool.unlink()


def test_a_disk_that_is_fuller_than_its_size_asks_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: Callable[..., list[str]]
) -> None:
    """The server starts again after others have filled the disk: its tier is as large as there is room."""
    said = logged(machine)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**29, total=2**40))
    machine.check_disk(tmp_path, 0.4)
    assert said == []
    machine.check_disk(tmp_path, 1.0)
    assert "room for 0.50 GiB, not for 1" in said[0] and "LMCACHE_MAX_LOCAL_DISK_SIZE" in said[0]


# ---- ends that are no shutdown


@pytest.fixture
def orphan(tmp_path: Path) -> Iterator[Callable[[], tuple[int, int, Path]]]:
    """Starts a server as an engine's worker does, kills the worker; the server's pid, port and memory."""
    left: list[int] = []

    def begin() -> tuple[int, int, Path]:
        port = reserved_port()
        words = [
            sys.executable,
            "-m",
            "lmcache.v1.multiprocess.http_server",
            *options(port, reserved_port(), 0.05),
        ]
        worker = textwrap.dedent(
            f"""
            import os, subprocess, time
            os.environ[{STARTED_BY!r}] = str(os.getpid())
            log = open({str(tmp_path / "log")!r}, "w")
            print(subprocess.Popen({words!r}, stdout=log, stderr=log).pid, flush=True)
            time.sleep(999)
            """
        )
        env = {**os.environ, **CPU_ENV}
        process = subprocess.Popen([sys.executable, "-c", worker], stdout=subprocess.PIPE, env=env)
        assert process.stdout is not None
        left.append(int(process.stdout.readline()))
        wait_for(lambda: owners_of_sockets(port, LISTENING), "it listens", every_s=0.2)
        process.kill()
        process.wait()
        return left[0], port, leftover_pool(shm_name(port))

    yield begin
    for pid in left:
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.real
def test_a_server_whose_engine_was_killed_serves_others_then_ends_and_frees_its_memory(
    orphan: Callable[[], tuple[int, int, Path]],
) -> None:
    pid, port, pool = orphan()
    with socket.create_connection(("127.0.0.1", port)):
        time.sleep(6)
        assert is_alive(pid) and pool.exists()
    wait_for(lambda: not is_alive(pid), "it ends", every_s=0.2)
    assert not pool.exists()
