"""Start a real `lmcache server` with this package's tier module (docs/lmcache.md).

with serve_mp(l1_gb=1.0, disk=Path("lmcache-disk"), log=Path("mp.log")) as mp: ... mp.transfer_config
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from connectors.lmcache_mp.server.command_line import leftover_pool, options, shm_name
from experiments.server import (
    CPU_ENV,
    ServerError,
    begun,
    reserved_port,
    script,
    stop,
    tail,
    wait_until_healthy,
)

OURS = {  # this package's, by its path: under vLLM's own name a policy of vLLM's has no metrics of ours
    "kv_connector": "ContinuumLMCacheMPConnector",
    "kv_connector_module_path": "connectors.lmcache_mp",
}
HITS = {"lmcache_mp_lookup_hit_l1_tokens_total": "dram", "lmcache_mp_lookup_hit_l2_tokens_total": "ssd"}


@dataclass
class MpProcess:
    """One server's address, and its process while it runs. It restarts at the same address."""

    l1_gb: float
    disk: Path
    log: Path
    more: tuple[str, ...] = ()
    module: bool = True  # this package's tier module; False: LMCache's server as it comes
    disk_gb: float | None = None  # None: no bound, and nothing is evicted; 0: no disk
    port: int = field(default_factory=reserved_port)
    http_port: int = field(default_factory=reserved_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def memory(self) -> Path:
        """The shared memory of L1."""
        return leftover_pool(shm_name(self.port))

    @property
    def transfer_config(self) -> dict[str, Any]:
        """The value of `--kv-transfer-config`."""
        place = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": self.port}
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": place,
        }

    def command(self) -> list[str]:
        disk = "" if self.disk_gb == 0 else str(self.disk)
        words = options(self.port, self.http_port, self.l1_gb, disk, self.disk_gb, self.module)
        return [*script("lmcache", "lmcache.cli.main"), "server", *words, *self.more]

    def start(self) -> None:
        """Returns when it answers. Raises ServerError with the log's tail if it does not."""
        self.begin()
        self.wait_until_healthy()

    def begin(self) -> None:
        """Starts the process."""
        self.disk.mkdir(parents=True, exist_ok=True)
        self.process = begun(self.command(), {**os.environ, **CPU_ENV}, self.log, "a")

    def wait_until_healthy(self, start_s: float = 300.0) -> None:
        """Returns when it answers. Raises ServerError with the log's tail if it does not."""
        assert self.process is not None
        url = f"http://127.0.0.1:{self.http_port}"
        wait_until_healthy(url, self.process, self.log, start_s, "lmcache server", "/healthcheck")

    def kill(self) -> None:
        """SIGKILL: its clients get no message."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def hits(self) -> dict[str, float]:
        """Tokens that lookups found so far, by tier. Raises ServerError."""
        found = dict.fromkeys(("dram", "ssd"), 0.0)
        try:
            text = httpx.get(f"http://127.0.0.1:{self.http_port}/metrics", timeout=30).text
        except httpx.TransportError as error:
            raise ServerError(
                f"lmcache server does not answer ({error}); its log ends:\n{tail(self.log)}"
            ) from error
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if tier := HITS.get(sample.name):
                    found[tier] += sample.value
        return found

    def clear_l1(self) -> None:
        """Drop all of L1; L2 keeps what it has."""
        httpx.post(f"http://127.0.0.1:{self.http_port}/cache/clear", timeout=30).raise_for_status()


@contextlib.contextmanager
def serve_mp(
    l1_gb: float,
    disk: Path,
    log: Path,
    *more: str,
    module: bool = True,
    disk_gb: float | None = None,
    wait: bool = True,
) -> Iterator[MpProcess]:
    """A server that answers; it is always stopped at the end. `more` is added to its command line.

    Without `wait` it may still be starting: a vLLM that starts meanwhile takes longer to ask for it.
    """
    mp = MpProcess(l1_gb, disk, log, more, module, disk_gb)
    try:
        mp.begin()
        if wait:
            mp.wait_until_healthy()
        yield mp
    finally:
        if mp.process is not None:
            stop(mp.process)
        mp.memory.unlink(missing_ok=True)  # a killed server leaves it
