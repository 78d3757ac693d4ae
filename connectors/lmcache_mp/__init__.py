"""LMCache as a server process (MP). Importing this package imports neither vLLM nor LMCache."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """The connector's class, which vLLM looks up here by name."""
    if name != "ContinuumLMCacheMPConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from connectors.lmcache_mp.connector import ContinuumLMCacheMPConnector
    except ModuleNotFoundError as missing:
        if not str(missing.name).startswith("lmcache"):
            raise
        from continuum_lmcache.errors import ConfigError

        raise ConfigError(
            f"{missing.name} is missing: install LMCache 0.5.6 (pip install lmcache==0.5.6)"
        ) from missing
    return ContinuumLMCacheMPConnector
