"""LMCache as a server process (MP). Importing this package imports neither vLLM nor LMCache."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """The connector's class, which vLLM looks up here by name."""
    if name != "ContinuumLMCacheMPConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from connectors.lmcache_mp.connector import ContinuumLMCacheMPConnector

    return ContinuumLMCacheMPConnector
