"""How large the tiers are, how fast, and how their KV is cut."""

from __future__ import annotations

import math
from dataclasses import dataclass

from continuum_lmcache.config import require

GB = 2**30  # as LMCache counts its `max_local_cpu_size`


@dataclass(frozen=True, slots=True)
class TierSpec:
    """Sizes in GB of 2^30 bytes per rank, rates in 10^9 bytes/s, times in seconds.

    A size of 0 leaves a tier out. A missing rate takes no time. Raises ConfigError.
    """

    dram_gb: float = 1.0
    ssd_gb: float = 0.0
    chunk_tokens: int = 256
    load_gbps: float = math.inf  # DRAM to GPU
    ssd_load_gbps: float = math.inf
    ssd_store_gbps: float = math.inf
    load_latency_s: float = 0.0  # added to every load, whatever its size

    def __post_init__(self) -> None:
        for name in ("chunk_tokens", "load_gbps", "ssd_load_gbps", "ssd_store_gbps"):
            require(getattr(self, name) > 0, f"{name} of a tier", getattr(self, name), "more than 0")
        for name in ("dram_gb", "ssd_gb", "load_latency_s"):
            require(getattr(self, name) >= 0, f"{name} of a tier", getattr(self, name), "0 or more")
