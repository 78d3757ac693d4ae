"""vLLM's HTTP server in Rust (`VLLM_USE_RUST_FRONTEND=1 vllm serve`): nothing of ours runs in it.

It gives the engine a request's session id (X-Session-ID, session_id) and vllm_xargs, and drops every other
field. So the engine reads these (requests.py), and shows our metrics at a port of its own.

Seams, read in vLLM 0.31 to 0.33 and run on 0.32: EngineArgs._api_process_rank, which is -1 where `vllm serve`
starts a server in another process, and create_engine_config's `headless`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prometheus_client import start_http_server
from vllm import envs
from vllm.logger import init_logger

from continuum_lmcache.config import METRICS_PORT_OFFSET
from continuum_lmcache.errors import ConfigError
from continuum_lmcache.vllm_plugin.hooks import prometheus

logger = init_logger("vllm.continuum_lmcache")
ARGUMENTS = ("host", "port", "api_key")  # of `vllm serve`
TOLD = "continuum_rust_frontend"  # our attribute of the scheduler's config, which each engine's process gets
LIMITS = (
    "VLLM_USE_RUST_FRONTEND: X-Session-ID, session_id and vllm_xargs alone name programs, other fields do "
    "not arrive; data-parallel ranks are chosen without regard to programs; continuum_* metrics are not on "
    "its /metrics but on port %d (docs/clients.md)"
)


@dataclass(frozen=True, slots=True)
class RustFrontend:
    """Where its engines show their metrics: rank r at `port` + r."""

    host: str  # "": all addresses
    port: int

    def show_metrics(self, policy: str, rank: int) -> None:
        """Serve this process's metrics. Without a port the engine serves without."""
        port = self.port + rank
        try:
            start_http_server(port, self.host or "0.0.0.0")
        except (OSError, OverflowError) as error:
            logger.warning("port %d for continuum_* metrics: %s; set continuum.metrics_port", port, error)
        prometheus.observe({"policy_info": {policy: 1.0}}, rank)


def chosen(arguments: Any, headless: bool) -> bool:
    """Whether this start's HTTP server is the one in Rust. `arguments`: EngineArgs."""
    return bool(envs.VLLM_USE_RUST_FRONTEND) and (headless or arguments._api_process_rank == -1)


def prepare(arguments: Any, metrics_port: int) -> RustFrontend:
    """Say what it cannot do. Raises ConfigError for several API keys: it does not tell whose a request is."""
    host, port, keys = (vars(arguments).get(name) or "" for name in ARGUMENTS)
    if len(keys) > 1:
        raise ConfigError(
            "--scheduling-policy continuum: behind VLLM_USE_RUST_FRONTEND programs of several API keys "
            "cannot be told apart; give one key, or unset VLLM_USE_RUST_FRONTEND"
        )
    found = RustFrontend(str(host), metrics_port or int(port or 0) + METRICS_PORT_OFFSET)
    logger.warning(LIMITS, found.port)
    return found
