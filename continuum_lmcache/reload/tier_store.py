"""What the core asks of a connector that keeps KV outside the GPU. Connectors implement these protocols."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from continuum_lmcache.types import Residency, Tier, TurnId


@dataclass(frozen=True, slots=True)
class TierHit:
    """What the tiers hold of a prompt's head, in the order it would be loaded."""

    dram_tokens: int
    ssd_tokens: int  # those after the DRAM stretch


@dataclass(frozen=True, slots=True)
class KVTransfer:
    """One real movement of KV from or to a tier, as it was timed."""

    tier: Tier
    direction: str  # "load" or "store"
    tokens: int
    size_bytes: int
    duration_s: float
    turn: str = ""  # whose, where the connector knows: vLLM's request id
    in_step: bool = True  # a step waited for it; false: it was asynchronous


@runtime_checkable
class StoreStatus(Protocol):
    """Names the store, and tells whether it answers. A store without this counts as "unknown", and as up."""

    mode: str

    @property
    def is_up(self) -> bool:
        """Whether what it holds can be loaded now."""


@runtime_checkable
class LookupRecord(Protocol):
    """Tells where a request's KV lay before its lookup moved it. For stores whose lookups move KV."""

    def found(self, request_id: str) -> TierHit | None:
        """What was held when the request was looked up; None once it has finished."""


@runtime_checkable
class TierStore(Protocol):
    """Tells where a prompt's KV lies below the GPU."""

    def locate(self, token_ids: Sequence[int], salt: str = "") -> TierHit:
        """What a load of this prompt would bring now. Only reads: it pins, touches and loads nothing.

        `salt` is the tenant's `cache_salt`; a store that separates tenants finds only that tenant's KV.
        """

    def transfers(self) -> list[KVTransfer]:
        """The transfers since the last call, oldest first."""

    def capacity_tokens(self) -> Mapping[Tier, int]:
        """How many tokens' KV each tier has room for; an absent tier is not in the mapping."""


@runtime_checkable
class StepTiming(Protocol):
    """A store for which steps wait. With two in flight, the outputs' times do not give each step's time."""

    def waits(self, metadata: Any) -> bool:
        """Whether the step with this connector metadata waits for loads or stores."""

    def step_s(self) -> float | None:
        """What the accelerator took for the step that was reported last; None: not known."""


LoadSelector = Callable[[TurnId, Residency], int]
"""How many of the tokens that the tiers hold of this turn's prompt to load: all, the DRAM part, or 0.
It may be called at every step while the turn waits; the last answer before an allocation counts."""


@runtime_checkable
class SelectiveLoader(Protocol):
    """A connector that can load less than it holds."""

    async_loads: bool  # false: a step waits for its loads, which delays all its turns

    def set_load_selector(self, rule: LoadSelector) -> None:
        """Offer vLLM no more tokens than `rule` returns. The scheduler calls this once, at its start.

        The connector must release its pins and leases on what is not loaded.
        """
