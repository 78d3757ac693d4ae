"""LMCache in the engine's process. Importing this package imports neither vLLM nor LMCache."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """The connector's class, which vLLM looks up here by name."""
    if name != "ContinuumLMCacheConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from connectors.lmcache.connector import ContinuumLMCacheConnector

    return ContinuumLMCacheConnector
