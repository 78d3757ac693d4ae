"""How large the tiers are, how fast, and how their KV is cut."""

from __future__ import annotations

import math
from dataclasses import dataclass

from continuum_lmcache.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TierSpec:
    """How large the tiers are and how fast. A size of 0 leaves a tier out; rates are 10^9 bytes/s."""

    bytes_per_token: int
    chunk_tokens: int = 256
    dram_bytes: float = math.inf
    ssd_bytes: float = 0.0
    load_gbps: float = math.inf  # DRAM to GPU
    store_gbps: float = math.inf  # GPU to DRAM
    ssd_load_gbps: float = math.inf
    ssd_store_gbps: float = math.inf
    load_latency_s: float = 0.0  # added to every load, whatever its size

    def __post_init__(self) -> None:
        for name in ("bytes_per_token", "chunk_tokens", "load_gbps", "store_gbps"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "more than 0")
        for name in ("ssd_load_gbps", "ssd_store_gbps"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "more than 0")
        for name in ("dram_bytes", "ssd_bytes", "load_latency_s"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_tokens * self.bytes_per_token

    def chunks(self, size_bytes: float) -> float:
        """Whole chunks that fit; may be infinite."""
        return size_bytes if math.isinf(size_bytes) else size_bytes // self.chunk_bytes


def _require(holds: bool, name: str, value: float, expected: str) -> None:
    if not holds:
        raise ConfigError(f"{name} of a tier is {value!r}; it must be {expected}")
