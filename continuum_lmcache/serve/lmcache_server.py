"""One LMCache MP server a node, kept alive by Ray: a deployment whose replica is that server's parent.

docs/lmcache.md has the server's options. A server that already answers at the address is used as it is:
another program started it, or it outlived this actor. It listens on 127.0.0.1, so each node needs its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from pathlib import Path

import httpx

from connectors.lmcache_mp.server.command_line import HOST, leftover_pool, options, shm_name
from continuum_lmcache.errors import ServerError
from continuum_lmcache.serve.listening import listen_on_node_address_only
from continuum_lmcache.serve.settings import ServeSettings

START_S = 180.0


class LMCacheServer:
    def __init__(self, settings: ServeSettings) -> None:
        listen_on_node_address_only()
        ports = settings.lmcache_port, settings.lmcache_http_port
        arguments = options(*ports, settings.lmcache_gb, settings.lmcache_disk)
        command = [sys.executable, "-m", "lmcache.cli.main", "server", *arguments]
        self._url = f"http://{HOST}:{settings.lmcache_http_port}/healthcheck"
        self._process: subprocess.Popen[bytes] | None = None
        if self._answers():
            return
        if settings.lmcache_disk:
            Path(settings.lmcache_disk).mkdir(parents=True, exist_ok=True)
        leftover_pool(shm_name(settings.lmcache_port)).unlink(missing_ok=True)
        self._process = subprocess.Popen(command)
        end_s = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end_s:
                raise ServerError(f"lmcache server did not start: {' '.join(command)}")
            time.sleep(0.25)

    def _answers(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(self._url, timeout=5).is_success
        return False

    async def ready(self) -> None:
        """Returns at once: a replica that answers this has a server that answered."""

    async def check_health(self) -> None:
        """Ray calls this every few seconds; an exception makes it start another."""
        if not await asyncio.to_thread(self._answers):
            raise ServerError(f"lmcache server does not answer at {self._url}")

    def __del__(self) -> None:
        if self._process is not None:
            self._process.terminate()
