"""The user's LMCache settings, read as LMCache reads them, except that nothing is dropped silently.

LMCache only warns about an unknown name, and a value that it cannot parse becomes None. Here an unread
variable is refused if it looks like a misspelt setting, and logged if it does not: other programs may
use the same environment.
Sources, in ascending precedence: the YAML file named by LMCACHE_CONFIG_FILE, LMCACHE_* variables,
`lmcache.*` keys of the KV connector's extra config.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import yaml
from lmcache.v1.config import _CONFIG_ALIASES, _CONFIG_DEFINITIONS
from lmcache.v1.config_base import _parse_quoted_string

from continuum_lmcache.config import refuse_unknown
from continuum_lmcache.errors import ConfigError

PREFIX = "lmcache."
ENV_PREFIX = "LMCACHE_"
EXTRA = "kv_connector_extra_config"
NAMES = _CONFIG_DEFINITIONS.keys() | _CONFIG_ALIASES.keys()
DEFAULTS: dict[str, Any] = {name: known["default"] for name, known in _CONFIG_DEFINITIONS.items()}
# read by LMCache's vLLM adapter itself, not through its configuration class
DIRECT = {"max_tokens_per_load": int}
BARE_KEYS = frozenset(
    {"lmcache_rpc_port", "discard_partial_chunks", "skip_last_n_tokens", "use_native", "use_layerwise"}
)
# variables that LMCache 0.5.6 reads outside its configuration class
ENV_NAMES = frozenset(
    {
        "config_file",
        "device_backend",
        "disable_banner",
        "force_skip_save",
        "gpu_staging_buffer_bytes",
        "log_level",
        "mq_timeout",
        "musa_handle_transfer",
        "musa_native_kv_transfer",
        "offload_rpc_port",
        "request_telemetry_endpoint",
        "request_telemetry_type",
        "rocm_enable_batch_memcpy",
        "server_url",
        "track_usage",
        "usage_track_interval",
        "usage_track_url",
        "use_upstream_mp",
    }
)
ENV_FAMILIES = ("ec_", "mp_", "coordinator_", "controller_", "resp_", "aerospike_", "runtime_plugin_")
# Kubernetes puts these into every pod that has a Service whose name begins with "lmcache"
KUBERNETES = re.compile(r"(service_host|service_port\w*|port_\d+_(tcp|udp|sctp)\w*)$")
KUBERNETES_PORT = ("tcp://", "udp://", "sctp://")
TYPO_SIMILARITY = 0.85  # of a misspelt name, by difflib; LMCACHE_RPC_PORT and LMCACHE_MP_PORT have 0.8


def given(extra: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """The user's LMCache settings by name, parsed, from all three sources. Raises ConfigError."""
    found = {**_from_file(environ), **_from_env(environ), **_from_extra(extra)}
    return {_CONFIG_ALIASES.get(name, name): _parsed(name, value) for name, value in found.items()}


def _from_file(environ: Mapping[str, str]) -> dict[str, Any]:
    name = environ.get("LMCACHE_CONFIG_FILE")
    if name is None:
        return {}
    if not Path(name).is_file():
        raise ConfigError(f"LMCACHE_CONFIG_FILE is {name!r}, which is no file; unset it or name a YAML file")
    try:
        found = yaml.safe_load(Path(name).read_text()) or {}
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"LMCACHE_CONFIG_FILE {name} is not YAML: {reason}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"LMCACHE_CONFIG_FILE {name} holds a {type(found).__name__}, not a YAML mapping")
    refuse_unknown(found, NAMES, "", name)
    return found


def unread(environ: Mapping[str, str]) -> list[str]:
    """LMCACHE_* variables that LMCache 0.5.6 does not read: an older version's, or a deployment's own."""
    return [f"{ENV_PREFIX}{name.upper()}" for name in _unread(_named(environ)) if not _is_likely_typo(name)]


def _from_env(environ: Mapping[str, str]) -> dict[str, Any]:
    named = _named(environ)
    typos = [name for name in _unread(named) if _is_likely_typo(name)]
    refuse_unknown(typos, NAMES | ENV_NAMES, ENV_PREFIX, "the environment", str.upper)
    return {name: _parse_quoted_string(value) for name, value in named.items() if name in NAMES}


def _named(environ: Mapping[str, str]) -> dict[str, str]:
    return {k.removeprefix(ENV_PREFIX).lower(): v for k, v in environ.items() if k.startswith(ENV_PREFIX)}


def _unread(named: Mapping[str, str]) -> list[str]:
    foreign = {n for n, v in named.items() if n.startswith(ENV_FAMILIES) or _is_kubernetes(n, v)}
    return sorted(named.keys() - foreign - NAMES - ENV_NAMES)


def _is_likely_typo(name: str) -> bool:
    return bool(difflib.get_close_matches(name, NAMES | ENV_NAMES, n=1, cutoff=TYPO_SIMILARITY))


def _is_kubernetes(name: str, value: str) -> bool:
    return bool(KUBERNETES.search(name)) or value.startswith(KUBERNETES_PORT)


def _from_extra(extra: Mapping[str, Any]) -> dict[str, Any]:
    if "lmcache" in extra:
        raise ConfigError(
            f"{EXTRA} has 'lmcache' as one object, which LMCache ignores; "
            'write flat keys, such as "lmcache.local_cpu": true'
        )
    refuse_unknown({k for k in extra if not k.startswith((PREFIX, "continuum."))}, BARE_KEYS, "", EXTRA)
    found = {k.removeprefix(PREFIX): v for k, v in extra.items() if k.startswith(PREFIX)}
    for name in found:
        if name.startswith("mp."):
            raise ConfigError(f"{PREFIX}{name} belongs to LMCacheMPConnector; this connector runs in-process")
    refuse_unknown(found, NAMES | DIRECT.keys(), PREFIX, EXTRA)
    return found


def _parsed(name: str, value: Any) -> Any:
    """A setting in its type. Raises ConfigError where LMCache would fail to parse it."""
    definition = _CONFIG_DEFINITIONS.get(_CONFIG_ALIASES.get(name, name))
    kind = definition["type"] if definition else DIRECT[name]
    if value is None and definition and definition["default"] is None:
        return None
    if kind is bool and str(value).strip().lower() not in ("true", "false", "1", "0"):
        raise ConfigError(f"{PREFIX}{name} is {value!r:.80}; it must be true or false")
    wanted = f"{PREFIX}{name} is {value!r:.80}; it must be of type {getattr(kind, '__name__', str(kind))}"
    try:
        found = (definition["env_converter"] if definition else kind)(value)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ConfigError(wanted) from error
    if not _is_of(kind, found):
        raise ConfigError(wanted)
    if isinstance(found, int | float) and not abs(found) < 2**63 and definition["default"] != found:
        raise ConfigError(f"{PREFIX}{name} is {value!r:.80}; it must be a number between -2**63 and 2**63")
    return found


def _is_of(kind: Any, value: Any) -> bool:
    """Whether a value has LMCache's type: a plain type, a list of one, or one of these or None."""
    choices = get_args(kind) if get_origin(kind) is Union else (kind,)
    return any(isinstance(value, get_origin(choice) or choice) for choice in choices)
