"""vLLM's own offloading to CPU memory. Importing this package does not import vLLM."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """The connector's class, which vLLM looks up here by name."""
    if name != "ContinuumOffloadingConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from connectors.native.connector import ContinuumOffloadingConnector

    return ContinuumOffloadingConnector
