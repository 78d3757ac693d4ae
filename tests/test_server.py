"""`serve` before its server answers; the tests of real servers check it afterwards."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from ray_server import serve_fleet
from waiting import PATIENCE_S

from experiments.gpu import agents
from experiments.server import ServerError, fast_dtype, reserved_port, serve
from experiments.tiny_model import profile_here

STOPS = """
import time
from experiments.server import unwind_on_sigterm
unwind_on_sigterm()
try:
    print("started", flush=True)
    time.sleep(60)
finally:
    print("stopped", flush=True)
"""


def bound(port: int, *options: int) -> socket.socket:
    server = socket.socket()
    for option in options:
        server.setsockopt(socket.SOL_SOCKET, option, 1)
    server.bind(("127.0.0.1", port))
    return server


def test_a_reserved_port_and_the_next_are_given_to_nobody_else_before_their_server_listens():
    port = reserved_port()
    ours = {port, port + 1}
    for each in ours:
        with pytest.raises(OSError, match="in use"):
            bound(each)
    others = [bound(0, socket.SO_REUSEADDR) for _ in range(200)]
    assert ours.isdisjoint(other.getsockname()[1] for other in others)
    for other in others:
        other.close()


@pytest.mark.parametrize("options", [[socket.SO_REUSEADDR], [socket.SO_REUSEADDR, socket.SO_REUSEPORT]])
def test_the_server_that_was_given_it_can_listen_and_comes_back_to_it(options: list[int]):
    """vLLM sets the second option when it has several API servers."""
    port = reserved_port()
    for _ in range(2):
        with bound(port, *options) as server:
            server.listen()
            with socket.create_connection(("127.0.0.1", port)):
                pass


def test_sigterm_stops_what_was_started():
    script = [sys.executable, "-c", STOPS]
    with subprocess.Popen(script, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == "stopped\n"
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("flags", "dtype", "profile"),
    [
        ("flags : avx512_bf16 amx_bf16 amx_tile", "bfloat16", "cpu-tiny-amx.yaml"),
        ("flags : fma avx512f avx512_bf16", "bfloat16", "cpu-tiny.yaml"),
        ("Features : asimd bf16", "bfloat16", "cpu-tiny.yaml"),
        ("flags : avx512f", "float32", "cpu-tiny-float32.yaml"),
    ],
)
def test_a_cpu_that_would_emulate_bfloat16_computes_in_float32_and_each_kind_has_its_profile(
    tmp_path, monkeypatch, flags, dtype, profile
):
    (tmp_path / "cpuinfo").write_text(flags + "\n")
    monkeypatch.setattr("experiments.server.CPU_FLAGS", tmp_path / "cpuinfo")
    assert fast_dtype() == dtype and profile_here() == profile
    assert (Path(__file__).parents[1] / "profiles" / profile).exists()


def test_a_system_that_does_not_list_its_cpus_instructions_computes_in_float32(tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.server.CPU_FLAGS", tmp_path / "cpuinfo")
    assert fast_dtype() == "float32"


def test_a_server_runs_the_plugin_of_this_checkout_whatever_is_installed(monkeypatch, tmp_path: Path):
    says = "import continuum_lmcache, os; print(continuum_lmcache.__file__, os.environ['PYTHONPATH'])"
    monkeypatch.setattr("experiments.server.script", lambda *_names: [sys.executable, "-c", says])
    with (
        pytest.raises(ServerError) as error,
        serve(tmp_path, log=tmp_path / "log", env={"PYTHONPATH": "/given"}),
    ):
        pass
    ours = Path(__file__).parents[1]
    assert f"{ours / 'continuum_lmcache' / '__init__.py'} {ours}:/given" in str(error.value)


def test_a_fleet_that_ends_before_it_is_up_is_a_server_error(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(ServerError, match="serve run exited with 1"), serve_fleet(tmp_path, tmp_path):
        pass


def test_a_server_that_is_frozen_when_idle_runs_only_while_it_is_asked():
    process = psutil.Popen(["sleep", "600"])

    def becomes_stopped(wanted: bool) -> bool:
        end_s = time.monotonic() + PATIENCE_S
        while (process.status() == psutil.STATUS_STOPPED) is not wanted and time.monotonic() < end_s:
            time.sleep(0.01)
        return (process.status() == psutil.STATUS_STOPPED) is wanted

    try:
        server = agents.Server(agents.CONTENDERS[0], "http://127.0.0.1:9", [process])
        server.freeze()
        assert becomes_stopped(True)
        with server.awake():
            assert becomes_stopped(False)
        assert becomes_stopped(True)
    finally:
        process.kill()
        process.wait()
