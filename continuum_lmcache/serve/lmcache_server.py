"""One LMCache MP server a node, in the care of an actor that the first replica there starts.

docs/lmcache.md has the server's options. It listens on 127.0.0.1, so each node with a replica needs its own.
The actor is no part of the deployment, so what the tiers hold outlives replicas and versions. A server that
already answers at the address is used as it is: another program started it, or it outlived its actor.

Seam, read and run on Ray 2.60.0: detached actors by name, with get_if_exists, bound to a node.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from connectors.lmcache_mp.server.command_line import HOST, leftover_pool, options, shm_name
from connectors.lmcache_mp.server.parent import ESTABLISHED, STARTED_BY, owners_of_sockets
from continuum_lmcache.errors import ServerError
from continuum_lmcache.serve.settings import ServeSettings

logger = logging.getLogger("ray.serve")
START_S, STOP_S = 180.0, 10.0
CHECK_S = 2.0
SILENT_CHECKS = 3  # one after the other: then the server is started again
UNUSED_S = 600.0  # without an engine: the next version's may still load its weights


async def start_on_this_node(settings: ServeSettings) -> None:
    """Return once this node's server answers. Raises RayError with the ServerError."""
    node = ray.get_runtime_context().get_node_id()
    actor = ray.remote(LMCacheServer).options(
        name=f"lmcache-{settings.lmcache_port}-{node}",
        namespace="continuum",
        get_if_exists=True,
        lifetime="detached",
        max_restarts=-1,
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    )
    await actor.remote(settings).serve.remote(settings)


class LMCacheServer:
    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._used_s = time.monotonic()
        self._changing = threading.Lock()
        threading.Thread(target=self._watch, daemon=True).start()  # also if Ray starts the actor again

    def serve(self, settings: ServeSettings) -> None:
        """Return once the server answers: the one that runs, unless it was started with other options."""
        with self._changing:
            if command(settings) != command(self._settings):
                self._stop()
            self._settings = settings
            self._start()
        self._used_s = time.monotonic()

    def _watch(self) -> None:
        """Start the server again when it does not answer; end it, and this actor, when no engine uses it."""
        silent = 0
        while time.monotonic() - self._used_s < UNUSED_S:
            time.sleep(CHECK_S)
            with self._changing:
                silent = 0 if self._answers() else silent + 1
                if silent == SILENT_CHECKS:
                    self._stop()
                    try:
                        self._start()
                    except ServerError as error:
                        logger.warning("%s; prompts are computed meanwhile", error)
                    silent = 0
            if owners_of_sockets(self._settings.lmcache_port, ESTABLISHED):
                self._used_s = time.monotonic()
        with self._changing:
            self._stop()
            ray.kill(ray.get_runtime_context().current_actor)

    def _start(self) -> None:
        if self._answers():
            return
        if self._settings.lmcache_disk:
            Path(self._settings.lmcache_disk).mkdir(parents=True, exist_ok=True)
        leftover_pool(shm_name(self._settings.lmcache_port)).unlink(missing_ok=True)
        words = command(self._settings)
        self._process = subprocess.Popen(words, env={**os.environ, STARTED_BY: str(os.getpid())})
        end_s = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end_s:
                raise ServerError(f"lmcache server did not start: {' '.join(words)}")
            time.sleep(0.25)

    def _stop(self) -> None:
        """The server, if this actor started it."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            url = f"http://{HOST}:{self._settings.lmcache_http_port}/healthcheck"
            return httpx.get(url, timeout=5).is_success
        return False


def command(settings: ServeSettings) -> list[str]:
    ports = settings.lmcache_port, settings.lmcache_http_port
    arguments = options(*ports, settings.lmcache_gb, settings.lmcache_disk)
    return [sys.executable, "-m", "lmcache.cli.main", "server", *arguments]
