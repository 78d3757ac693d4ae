"""The one boundary to whoever keeps KV outside the GPU. The core owns it, connectors implement it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from continuum_lmcache.types import Tier


@dataclass(frozen=True, slots=True)
class Holding:
    """What the tiers hold of a prompt's head, in the order it would be loaded."""

    dram_tokens: int
    ssd_tokens: int  # those after the DRAM stretch


@dataclass(frozen=True, slots=True)
class Transfer:
    """One real movement of KV from or to a tier, as it was timed."""

    tier: Tier
    direction: str  # "load" or "store"
    tokens: int
    size_bytes: int
    duration_s: float


@runtime_checkable
class TierStore(Protocol):
    """Answers: where does this prompt's KV lie, below the GPU?"""

    def locate(self, token_ids: Sequence[int]) -> Holding:
        """What a load of this prompt would bring now. Reads only: no pin, no touch, no load."""

    def forget(self, token_ids: Sequence[int], kept_tokens: int = 0) -> None:
        """Nobody will ask for this prompt's KV behind its first `kept_tokens`: drop it when it suits.

        A hint: a store that cannot drop does nothing.
        """

    def store_from_now(self, wanted: bool) -> None:
        """Store what is computed from now on, or leave it. A hint, as `forget`; the start is to store."""

    def stalls(self) -> bool:
        """Whether steps wait for their stores: storing then costs everybody's time."""

    def transfers(self) -> list[Transfer]:
        """The movements since the last call, oldest first."""

    def capacity_tokens(self) -> Mapping[Tier, int]:
        """How many tokens' KV each tier has room for; a tier that is not there is not named."""
