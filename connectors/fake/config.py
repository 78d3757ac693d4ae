"""The fake connector's settings: `fake.*` keys of kv_connector_extra_config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from connectors.tier_model.tier_spec import TierSpec
from continuum_lmcache.config import refuse_unknown
from continuum_lmcache.errors import ConfigError

PREFIX = "fake."
GB = 2**30  # as LMCache counts its `max_local_cpu_size`


@dataclass(frozen=True, slots=True)
class FakeConfig:
    """Sizes in GB of 2^30 bytes per rank, rates in 10^9 bytes/s, times in seconds.

    A missing rate takes no time.
    """

    dram_gb: float = 1.0
    ssd_gb: float = 0.0
    chunk_tokens: int = 256
    load_gbps: float = math.inf  # DRAM to GPU
    store_gbps: float = math.inf  # GPU to DRAM
    ssd_load_gbps: float = math.inf
    ssd_store_gbps: float = math.inf
    load_latency_s: float = 0.0
    save_decode_cache: bool = True  # LMCache's default is false: generated tokens are then not stored
    sleep: bool = False  # a load takes the time that the rates give
    corrupt: bool = False  # load nothing, but report it as loaded: a test that still passes checks nothing

    @classmethod
    def load(cls, extra: Mapping[str, Any]) -> FakeConfig:
        """From a connector's extra config; ignores keys without the prefix. Raises ConfigError."""
        given = {k.removeprefix(PREFIX): v for k, v in extra.items() if k.startswith(PREFIX)}
        refuse_unknown(given, KEYS, PREFIX, "kv_connector_extra_config")
        return cls(**{k: _checked(k, value, str(KEYS[k].type)) for k, value in given.items()})

    def tier_spec(self, bytes_per_token: int, block_tokens: int) -> TierSpec:
        """The tiers of an engine with this much KV a token. Raises ConfigError."""
        if self.chunk_tokens % block_tokens:
            raise ConfigError(
                f"{PREFIX}chunk_tokens is {self.chunk_tokens}, not a multiple of the engine's blocks of "
                f"{block_tokens} tokens, and only whole blocks can be moved; change it or --block-size"
            )
        return TierSpec(
            bytes_per_token=bytes_per_token,
            chunk_tokens=self.chunk_tokens,
            dram_bytes=self.dram_gb * GB,
            ssd_bytes=self.ssd_gb * GB,
            load_gbps=self.load_gbps,
            store_gbps=self.store_gbps,
            ssd_load_gbps=self.ssd_load_gbps,
            ssd_store_gbps=self.ssd_store_gbps,
            load_latency_s=self.load_latency_s,
        )


KEYS = {f.name: f for f in fields(FakeConfig)}


def _checked(key: str, value: Any, kind: str) -> Any:
    """A JSON value of the field's kind. Raises ConfigError."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    kinds = {
        "bool": (isinstance(value, bool), "true or false"),
        "int": (number and value >= 1 and value == int(value), "a whole number, 1 or more"),
        "float": (number and value >= 0 and not math.isnan(value), "a number, 0 or more"),
    }
    holds, expected = kinds[kind]
    if not holds:
        raise ConfigError(f"{PREFIX}{key} is {value!r}; it must be {expected}")
    return value
