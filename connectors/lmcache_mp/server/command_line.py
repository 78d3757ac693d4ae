"""The command line of `lmcache server` with this package's tier module (docs/lmcache.md)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from connectors.lmcache_mp.wire import MODULE

HOST = "127.0.0.1"
CHUNK_TOKENS = 256


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
    words = ["--host", HOST, "--port", str(port), "--http-host", HOST, "--http-port", str(http_port)]
    words += ["--chunk-size", str(CHUNK_TOKENS), "--l1-size-gb", str(l1_gb), "--eviction-policy", "LRU"]
    words += ["--supported-transfer-mode", "auto", "--shm-name", shm_name(port)]
    if disk:
        l2: dict[str, Any] = {"type": "fs_native", "base_path": disk, "use_odirect": True}
        if disk_gb is not None:
            l2 |= {"max_capacity_gb": disk_gb, "eviction": {"eviction_policy": "LRU"}}
        words += ["--l2-adapter", json.dumps(l2), "--l2-prefetch-policy", "retain"]
    if module:
        words += ["--server-module", json.dumps({"module_path": MODULE})]
    return words


def shm_name(port: int) -> str:
    """The name of L1's shared memory; servers of one machine differ by their port."""
    return f"continuum-mp-{port}"


def leftover_pool(name: str) -> Path:
    """That memory as a file, which a killed server leaves. LMCache puts its own prefix before the name."""
    return Path("/dev/shm", f"lmcache_l1_pool_{name}")
