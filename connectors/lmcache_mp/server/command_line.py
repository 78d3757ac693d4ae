"""The command line of `lmcache server` with this package's tier module (docs/lmcache.md)."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from connectors.lmcache_mp.wire import MODULE
from continuum_lmcache.connector_names import SERVER_ARGS
from continuum_lmcache.errors import ConfigError
from continuum_lmcache.reload.cost_model import CHUNK_TOKENS

HOST = "127.0.0.1"
DISK = {"type": "fs_native", "use_odirect": True}  # of L2
EVICTING = {"eviction": {"eviction_policy": "LRU"}}  # where it has a size


def options(
    port: int,
    http_port: int,
    l1_gb: float,
    disk: str = "",
    disk_gb: float | None = None,
    module: bool = True,
) -> list[str]:
    """The arguments after `lmcache server`, on loopback, with the options that docs/lmcache.md recommends.

    `disk`: the directory of L2, "" for no L2. `disk_gb`: its size; with None nothing is evicted.
    `module`: with our tier module.
    """
    args, _ = parsed_words([], port)
    args.l1_size_gb, args.http_port = l1_gb, http_port
    size = {} if disk_gb is None else {"max_capacity_gb": disk_gb, **EVICTING}
    args.l2_adapter = [{**DISK, "base_path": disk, **size}] if disk else []
    return ["--host", HOST, "--port", str(port), "--http-host", HOST, *words(args, module)]


def parsed_words(given: Sequence[str], port: int) -> tuple[argparse.Namespace, list[str]]:
    """The options that matter here, completed, and the others. Raises ConfigError."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--l1-size-gb", type=float)
    parser.add_argument("--chunk-size", type=int, default=CHUNK_TOKENS)
    parser.add_argument("--eviction-policy", default="LRU")
    parser.add_argument("--eviction-trigger-watermark", type=float)
    parser.add_argument("--supported-transfer-mode", default="auto")
    parser.add_argument("--shm-name", default=shm_name(port))
    parser.add_argument("--http-port", type=int, default=port + 1)
    parser.add_argument("--l2-prefetch-policy", default="retain")
    parser.add_argument("--l2-adapter", type=_json_object, action="append", default=[])
    parser.add_argument("--server-module", action="append", default=[])
    return parser.parse_known_args(given)


def words(args: argparse.Namespace, module: bool = True) -> list[str]:
    """Those options as a command line, with our tier module, unless it is left out."""
    modules = list(args.server_module)
    if module and not any(MODULE in given for given in modules):
        modules.append(json.dumps({"module_path": MODULE}))
    found = []
    for name, value in (vars(args) | {"server_module": modules}).items():
        for one in value if isinstance(value, list) else [value]:
            if one is not None:
                found += [f"--{name.replace('_', '-')}", as_word(one)]
    return found


def as_word(value: Any) -> str:
    if isinstance(value, dict):
        return json.dumps(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def shm_name(port: int) -> str:
    """The name of L1's shared memory; servers of one machine differ by their user and port."""
    return f"continuum-mp-{os.getuid()}-{port}"


def leftover_pool(name: str) -> Path:
    """That memory as a file, which a killed server leaves. LMCache puts its own prefix before the name."""
    return Path("/dev/shm", f"lmcache_l1_pool_{name}")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{SERVER_ARGS}: {message}")


def _json_object(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text} is no JSON object")
    return found
