"""A user's LMCache settings as options of LMCache's own server, which `lmcache.mp.autostart` starts.

LMCache's settings for one process come from the YAML file that LMCACHE_CONFIG_FILE names, LMCACHE_* variables
and `lmcache.*` keys of the KV connector's extra config; the later source wins, as in LMCache 0.5.6. Each
overrides what `lmcache.mp.autostart.server_args` says. Sizes in them are those of one rank; the server holds
all ranks' KV. What has no counterpart is named, or refused where KV would lie elsewhere.
"""

from __future__ import annotations

import argparse
import difflib
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from lmcache.v1.config import _CONFIG_ALIASES, _CONFIG_DEFINITIONS

from connectors.lmcache_mp.server.command_line import DISK, EVICTING, parsed_words, words
from connectors.lmcache_mp.settings import server_urls
from continuum_lmcache.capacity.kv_budget import GIB
from continuum_lmcache.config import parsed, refuse_unknown
from continuum_lmcache.connector_names import AUTOSTART, EXTRA, SERVER_ARGS
from continuum_lmcache.connector_names import LMCACHE_PREFIX as PREFIX
from continuum_lmcache.connector_names import MP_PREFIX as MP
from continuum_lmcache.errors import ConfigError

L1_GIB = 5.0  # LMCache's max_local_cpu_size
SPARE_SHARE = 0.5  # of L1 at most, that eviction keeps free for one load from L2
WATERMARK = 0.8  # LMCache's: eviction keeps the rest of L1 free
TRANSLATED = {  # LMCache's settings that the server or the MP connector has too
    "chunk_size": "int",
    "max_local_cpu_size": "float",
    "local_disk": "str",
    "max_local_disk_size": "float",
    "save_decode_cache": "bool",
}
ELSEWHERE = frozenset(  # settings by which LMCache would put KV somewhere else
    {"remote_url", "gds_path", "maru_path", "enable_p2p", "enable_pd", "enable_blending"}
    | {"storage_plugins", "remote_storage_plugins", "external_lookup_client"}
)
DEFAULTS = (("local_cpu", "true"), ("local_cpu", "1"), ("cache_policy", "lru"))  # what it does anyway
NAMES = _CONFIG_DEFINITIONS.keys() | _CONFIG_ALIASES.keys() | {"max_tokens_per_load"}
MISSPELT = 0.85  # how much a variable's name is like a setting's, 0 to 1
BARE_KEYS = frozenset(  # of LMCacheConnectorV1, without a prefix
    {"lmcache_rpc_port", "discard_partial_chunks", "skip_last_n_tokens", "use_native", "use_layerwise"}
)


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What the server's sizes must fit."""

    ranks: int  # each of which LMCache in one process would give a DRAM pool and a disk
    block_tokens: int
    kv_bytes_per_token: int  # of all of an engine's ranks
    longest_prompt_tokens: int


def translated(
    extra: Mapping[str, Any], environ: Mapping[str, str], shape: EngineShape
) -> tuple[dict[str, Any], str]:
    """The extra config for LMCacheMPConnector, and one line that says what became of the settings.

    A second call changes nothing. Without `lmcache.mp.autostart` the server has its own command line. Raises
    ConfigError.
    """
    variables = _variables(environ)
    if not parsed(AUTOSTART, extra.get(AUTOSTART, False), "bool"):
        idle = _spelled(variables, environ)
        return dict(extra), f"no effect without {AUTOSTART}: {', '.join(idle)}" if idle else ""
    user = {**_from_file(environ), **variables, **_from_extra(extra)}
    if elsewhere := sorted(
        name for name in user.keys() & ELSEWHERE if user[name] not in (None, "", "false", False)
    ):
        raise ConfigError(
            f"{PREFIX}{elsewhere[0]}: LMCache's server has options of its own for this; remove the setting, "
            f"and put them into {SERVER_ARGS} (lmcache server --help)"
        )
    values = {
        name: parsed(PREFIX + name, user[name], kind)
        for name, kind in TRANSLATED.items()
        if user.get(name) is not None
    }
    command = shlex.join(server_words(extra, values, shape))
    kept = {k: v for k, v in extra.items() if _is_kept(k)}
    if "save_decode_cache" in values:
        kept[MP + "save_decode_cache"] = values["save_decode_cache"]
    line = f"LMCache's server on port {port_of(extra)}, if none runs there: {command}"
    if values:
        line += f"; from {', '.join(_spelled(values, environ))}"
    ignored = [n for n, v in user.items() if n not in TRANSLATED and (n, str(v).lower()) not in DEFAULTS]
    if ignored:
        line += f"; without a counterpart, so without effect: {', '.join(_spelled(ignored, environ))}"
    return {**kept, AUTOSTART: True, SERVER_ARGS: command}, line


def server_words(extra: Mapping[str, Any], values: Mapping[str, Any], shape: EngineShape) -> list[str]:
    """The server's command line: `server_args`, overridden by `values`, completed. Raises ConfigError."""
    args, rest = parse_server_args(extra)
    chunk_tokens = values.get("chunk_size", args.chunk_size)
    if chunk_tokens <= 0 or chunk_tokens % shape.block_tokens:
        fix = max(1, -(-chunk_tokens // shape.block_tokens)) * shape.block_tokens
        raise ConfigError(
            f"{PREFIX}chunk_size is {chunk_tokens} tokens and vLLM's block {shape.block_tokens}; a chunk "
            f"must be whole blocks: set it to {fix}"
        )
    prompt_gib = shape.longest_prompt_tokens * shape.kv_bytes_per_token / GIB
    l1_gib = args.l1_size_gb or max(L1_GIB, round(prompt_gib / SPARE_SHARE + 0.1, 1))
    if "max_local_cpu_size" in values:
        l1_gib = values["max_local_cpu_size"] * shape.ranks
    if l1_gib * GIB < chunk_tokens * shape.kv_bytes_per_token:
        needed_mib = chunk_tokens * shape.kv_bytes_per_token / 2**20
        raise ConfigError(
            f"{PREFIX}max_local_cpu_size gives LMCache's L1 {l1_gib:g} GiB, but one chunk of {chunk_tokens} "
            f"tokens takes {needed_mib:.1f} MiB, and disk loads pass through it too; give it more"
        )
    adapters = disk_adapters(args.l2_adapter, values, shape)
    watermark = args.eviction_trigger_watermark
    if watermark is None and adapters and prompt_gib > (1 - WATERMARK) * l1_gib:
        watermark = round(max(1 - SPARE_SHARE, 1 - prompt_gib / l1_gib - 0.01), 2)
    args.l1_size_gb, args.chunk_size, args.l2_adapter = l1_gib, chunk_tokens, adapters
    args.eviction_trigger_watermark = watermark
    return [*words(args), *rest]


def parse_server_args(extra: Mapping[str, Any]) -> tuple[argparse.Namespace, list[str]]:
    """`server_args`: the options that matter here, completed, and the others. Raises ConfigError."""
    try:
        return parsed_words(shlex.split(extra.get(SERVER_ARGS) or ""), port_of(extra))
    except (ValueError, AttributeError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{SERVER_ARGS} is {extra[SERVER_ARGS]!r:.80}; it must be a command line: {error}"
        ) from error


def disk_adapters(
    adapters: list[dict[str, Any]], values: Mapping[str, Any], shape: EngineShape
) -> list[dict[str, Any]]:
    """L2, with the user's folder and size. Raises ConfigError."""
    if not values.keys() & {"local_disk", "max_local_disk_size"}:
        return adapters
    if values.get("local_disk") == "":
        return []
    disk = {**(adapters[0] if len(adapters) == 1 else DISK | EVICTING)}
    if "local_disk" in values:
        folder = values["local_disk"].strip().removeprefix("file://")
        if "://" in folder or "," in folder:
            raise ConfigError(
                f"{PREFIX}local_disk is {folder!r:.80}; it must be one directory, or its file:// URL"
            )
        disk["base_path"] = folder
    if "max_local_disk_size" in values:
        disk["max_capacity_gb"] = values["max_local_disk_size"] * shape.ranks
    if not disk.get("base_path"):
        if not disk["max_capacity_gb"]:
            return []
        raise ConfigError(
            f"{PREFIX}max_local_disk_size is set but local_disk is not: there would be no disk tier; set it, "
            'e.g. "file://./lmcache-disk/"'
        )
    if not disk.get("max_capacity_gb", 0) > 0:
        raise ConfigError(
            f"{PREFIX}local_disk is {disk['base_path']!r} but max_local_disk_size is not above 0: nothing "
            "would be kept there; set it, in GiB"
        )
    return [disk]


def port_of(extra: Mapping[str, Any]) -> int:
    """The server's port. Raises ConfigError."""
    for url in server_urls(extra.get(MP + "server_urls") or "")[:1]:
        if port := urlsplit(url if "://" in url else f"tcp://{url}").port:
            return port
    return int(parsed(MP + "port", extra.get(MP + "port", 5555), "int"))


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
    return {str(key): value for key, value in found.items()}


def misspelt(environ: Mapping[str, str]) -> list[str]:
    """For each variable that is no setting, and nearly one: a sentence that says so."""
    near = {name: difflib.get_close_matches(name, TRANSLATED, 1, MISSPELT) for name in _variables(environ)}
    return [
        f"LMCACHE_{name.upper()} is no setting of LMCache and has no effect: did you mean "
        f"LMCACHE_{close[0].upper()}?"
        for name, close in near.items()
        if name not in NAMES and close
    ]


def _variables(environ: Mapping[str, str]) -> dict[str, Any]:
    """The settings among the variables, and misspelt ones. Others are LMCache's own, or a deployment's."""
    named = {k.removeprefix("LMCACHE_").lower(): v for k, v in environ.items() if k.startswith("LMCACHE_")}
    return {
        name: value.strip("'\"")
        for name, value in named.items()
        if name in NAMES or difflib.get_close_matches(name, TRANSLATED, 1, MISSPELT)
    }


def _from_extra(extra: Mapping[str, Any]) -> dict[str, Any]:
    if "lmcache" in extra:
        raise ConfigError(
            f"{EXTRA} has 'lmcache' as one object, which LMCache ignores; write flat keys, such as "
            '"lmcache.chunk_size": 256'
        )
    found = {k.removeprefix(PREFIX): v for k, v in extra.items() if not _is_kept(k) and k not in BARE_KEYS}
    refuse_unknown(found, NAMES, PREFIX, EXTRA)
    return found | {k: v for k, v in extra.items() if k in BARE_KEYS}


def _is_kept(key: str) -> bool:
    """Whether the MP connector has a key of this kind, or refuses it itself."""
    return key.startswith(MP) or not (key.startswith(PREFIX) or key in BARE_KEYS)


def _spelled(names: Iterable[str], environ: Mapping[str, str]) -> list[str]:
    """The names as the user wrote them."""
    variables = {name: f"LMCACHE_{name.upper()}" for name in names}
    return sorted(variable if variable in environ else name for name, variable in variables.items())
