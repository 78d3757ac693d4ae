"""`lmcache.mp.*` settings of the KV connector: unknown ones are refused, defaults suit agents.

LMCache drops an unknown name silently. The tiers' sizes are no settings of the
connector: the MP server has them on its own command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmcache.integration.vllm.vllm_multi_process_adapter import ExtraConfigDefault

from continuum_lmcache.config import refuse_unknown
from continuum_lmcache.connector_names import EXTRA
from continuum_lmcache.connector_names import LMCACHE_PREFIX as PREFIX
from continuum_lmcache.connector_names import MP_PREFIX as MP
from continuum_lmcache.errors import ConfigError

# read by LMCache 0.5.6's MP connector beside ExtraConfigDefault's names
DIRECT = frozenset(
    ("autostart", "autostart.server_args", "autostart.wait_timeout", "eager_prefetch", "host", "port")
    + ("lazy_offload", "lazy_offload_policy", "lazy_offload_select_count", "lazy_offload_threshold")
    + ("save_decode_cache", "server_urls", "transfer_intermediate_tensors")
)
NAMES = DIRECT | {known.name for known in ExtraConfigDefault}
OURS: Mapping[str, Any] = {
    "save_decode_cache": True,  # the next turn's prompt holds this turn's output
    "heartbeat_interval": 5.0,  # how soon the connector uses a server that is back
    "mq_timeout": 30.0,  # LMCache: 300; a server that does not answer at the start is not there
}
UNSUPPORTED = {
    "lazy_offload": "pins and lazy offload would both decide what stays on the GPU; remove it",
    "transfer_intermediate_tensors": "it is experimental and was not checked; remove it",
}


def with_defaults(extra: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The extra config for LMCache, and which of its defaults are ours. Raises ConfigError."""
    given = {name.removeprefix(MP): value for name, value in extra.items() if name.startswith(MP)}
    refuse_unknown(given, NAMES, MP, EXTRA)
    for name in extra:
        if name.startswith(PREFIX) and not name.startswith(MP):
            raise ConfigError(
                f"{name} has no effect on an LMCache server that this engine does not start; set "
                "lmcache.mp.autostart to true, or put it on the server's command line (docs/lmcache.md)"
            )
    refuse_unknown([name for name in extra if not name.startswith((PREFIX, "continuum."))], (), "", EXTRA)
    for name, reason in UNSUPPORTED.items():
        if given.get(name):
            raise ConfigError(f"{MP}{name}: {reason}")
    if len(server_urls(given.get("server_urls", ""))) > 1:
        raise ConfigError(f"{MP}server_urls names several servers; this connector supports one")
    ours = {name: value for name, value in OURS.items() if name not in given}
    return {**extra, **{MP + name: value for name, value in ours.items()}}, ours


def server_urls(value: Any) -> list[str]:
    urls = value.split(",") if isinstance(value, str) else value
    if not isinstance(urls, list) or not all(isinstance(url, str) for url in urls):
        raise ConfigError(f"{MP}server_urls is {value!r:.80}; it must be text, or a list of texts")
    return [url for url in urls if url.strip()]
