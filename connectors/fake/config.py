"""The fake connector's settings: `fake.*` keys of kv_connector_extra_config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from connectors.tier_model.tier_spec import TierSpec
from continuum_lmcache.config import parsed, refuse_unknown

PREFIX = "fake."


@dataclass(frozen=True, slots=True)
class FakeConfig(TierSpec):
    """The tiers, and a fault for tests."""

    corrupt: bool = False  # load nothing, but report it as loaded: a test that still passes checks nothing

    @classmethod
    def load(cls, extra: Mapping[str, Any]) -> FakeConfig:
        """From a connector's extra config; ignores keys without the prefix. Raises ConfigError."""
        kinds = {f.name: str(f.type) for f in fields(cls)}
        given = {k.removeprefix(PREFIX): v for k, v in extra.items() if k.startswith(PREFIX)}
        refuse_unknown(given, kinds, PREFIX, "kv_connector_extra_config")
        return cls(**{k: parsed(PREFIX + k, value, kinds[k]) for k, value in given.items()})
