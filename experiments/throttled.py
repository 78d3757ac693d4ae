"""In-process LMCache with tiers as slow as one likes: for experiments on loads that do not pay.

    {"kv_connector": "ThrottledConnector", "kv_connector_module_path": "experiments.throttled", ...}

THROTTLE_DRAM_GBPS and THROTTLE_SSD_GBPS, in 10^9 bytes/s, are environment variables, since
LMCache's own settings leave no room for names that it does not know. A tier that is not named
keeps its speed. The time is really slept, in the read that LMCache times.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from connectors.lmcache import ContinuumLMCacheConnector

BACKENDS = {"LocalCPUBackend": "THROTTLE_DRAM_GBPS", "LocalDiskBackend": "THROTTLE_SSD_GBPS"}


class ThrottledConnector(ContinuumLMCacheConnector):
    """ContinuumLMCacheConnector whose reads take at least as long as the rates say."""

    def register_kv_caches(self, kv_caches: Any) -> None:
        super().register_kv_caches(kv_caches)
        for name, backend in self._impl.lmcache_engine.storage_manager.storage_backends.items():
            if gbps := float(os.environ.get(BACKENDS.get(name, ""), 0)):
                backend.batched_get_blocking = Slow(backend.batched_get_blocking, gbps)


class Slow:
    """A blocking read at `gbps` at most."""

    def __init__(self, read: Any, gbps: float) -> None:
        self._read, self._bytes_per_s = read, gbps * 1e9

    def __call__(self, keys: Sequence[Any]) -> Any:
        started_s = time.perf_counter()
        chunks = self._read(keys)
        size_bytes = sum(chunk.get_size() for chunk in chunks if chunk is not None)
        time.sleep(max(0.0, started_s + size_bytes / self._bytes_per_s - time.perf_counter()))
        return chunks
