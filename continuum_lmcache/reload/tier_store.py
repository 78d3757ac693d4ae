"""The protocols of a connector that keeps KV outside the GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from continuum_lmcache.types import Residency, Tier, TurnId


@dataclass(frozen=True, slots=True)
class TierHit:
    """What the tiers hold of a prompt's head, in the order of loading."""

    dram_tokens: int
    ssd_tokens: int  # those after DRAM's part


@dataclass(frozen=True, slots=True)
class KVTransfer:
    """One timed transfer of KV from or to a tier."""

    tier: Tier
    direction: str  # "load" or "store"
    tokens: int
    size_bytes: int
    duration_s: float
    turn: str = ""  # its turn, if the connector knows it: vLLM's request id


@runtime_checkable
class StoreStatus(Protocol):
    """Has the store's name and whether it answers. A store without this is "unknown", and up."""

    mode: str

    @property
    def is_up(self) -> bool:
        """Whether its KV can be loaded now."""


@runtime_checkable
class LookupRecord(Protocol):
    """Returns where a request's KV was before its lookup moved it. For stores whose lookups move KV."""

    def hit_at_lookup(self, request_id: str) -> TierHit | None:
        """What was held when the request was looked up; None once it has finished."""


@runtime_checkable
class TierStore(Protocol):
    """Returns where a prompt's KV is below the GPU."""

    def locate(self, token_ids: Sequence[int], salt: str = "") -> TierHit:
        """What a load of this prompt would return now. Only reads: it pins, touches and loads nothing.

        `salt` is the tenant's `cache_salt`; a store that separates tenants finds only that tenant's KV.
        """

    def transfers(self) -> list[KVTransfer]:
        """The transfers since the last call, oldest first."""

    def capacity_tokens(self) -> Mapping[Tier, int]:
        """How many tokens each tier holds before it evicts; a missing tier is not in the mapping."""


LoadSelector = Callable[[TurnId, Residency], int]
"""How many of the tokens that the tiers hold of this turn's prompt to load: all, DRAM's part, or 0.
It may be called at every step while the turn waits; the last answer before an allocation counts."""


@runtime_checkable
class SelectiveLoader(Protocol):
    """A connector that can load less than it holds. It loads beside the steps."""

    def set_load_selector(self, select: LoadSelector) -> None:
        """Offer vLLM no more tokens than `select` returns. The scheduler calls this once, at its start.

        The connector must release its pins and leases on what is not loaded.
        """
