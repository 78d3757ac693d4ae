"""The actor of a node's LMCache server, with a real server and without Ray: when it starts, again, and ends.

Runs where Ray is installed.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from waiting import PATIENCE_S, wait_for

pytest.importorskip("ray")

from continuum_lmcache.serve import lmcache_server
from continuum_lmcache.serve.lmcache_server import LMCacheServer
from continuum_lmcache.serve.settings import ServeSettings
from experiments.server import reserved_port

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when the actor has Ray end it."""
    found = threading.Event()
    here = SimpleNamespace(current_actor="this")
    its_ray = SimpleNamespace(kill=lambda _: found.set(), get_runtime_context=lambda: here)
    monkeypatch.setattr(lmcache_server, "ray", its_ray)
    return found


@pytest.fixture
def settings(tmp_path: Path) -> ServeSettings:
    ports = {"lmcache_port": reserved_port(), "lmcache_http_port": reserved_port()}
    return ServeSettings("m", lmcache_gb=0.5, lmcache_disk=str(tmp_path / "l2"), **ports)


def answers(settings: ServeSettings) -> bool:
    try:
        url = f"http://127.0.0.1:{settings.lmcache_http_port}/healthcheck"
        return httpx.get(url, timeout=5).is_success
    except httpx.TransportError:
        return False


def test_the_next_version_finds_the_server_unless_it_has_other_options_and_a_dead_one_is_started_again(
    settings: ServeSettings, ended: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = LMCacheServer(settings)

    def pid() -> int:
        return actor._process.pid if actor._process is not None else 0

    found = []
    for version in (settings, replace(settings, vllm="--others"), replace(settings, lmcache_gb=0.25)):
        actor.serve(version)
        assert answers(settings)
        found.append(pid())
    assert found[0] == found[1] != found[2]
    os.kill(pid(), signal.SIGKILL)
    wait_for(lambda: pid() not in (0, *found) and answers(settings), "another server", every_s=0.2)
    monkeypatch.setattr(lmcache_server, "UNUSED_S", 0.0)
    assert ended.wait(PATIENCE_S)


def test_a_server_ends_with_its_actor_when_no_engine_has_used_it_for_long(
    settings: ServeSettings, ended: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor, check_s = LMCacheServer(settings), lmcache_server.CHECK_S
    actor.serve(settings)
    monkeypatch.setattr(lmcache_server, "UNUSED_S", 3 * check_s)
    with socket.create_connection(("127.0.0.1", settings.lmcache_port)):
        assert not ended.wait(6 * check_s) and answers(settings), "something uses it"
    assert ended.wait(PATIENCE_S)
    assert not answers(settings)
