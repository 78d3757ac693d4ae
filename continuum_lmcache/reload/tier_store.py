"""The one boundary to whoever keeps KV outside the GPU. The core owns it, connectors implement it."""

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
    in_step: bool = True  # a step waited for it; false: it went on beside the steps


@runtime_checkable
class Reporting(Protocol):
    """Answers: what kind of store is this, and does it answer? A store without this is "unknown", and up."""

    mode: str

    @property
    def is_up(self) -> bool:
        """Whether what it holds can be loaded now."""


@runtime_checkable
class Remembering(Protocol):
    """Answers: where did this request's KV lie, before its lookup moved it? For stores whose lookups do."""

    def found(self, request_id: str) -> TierHit | None:
        """What was held when the request was looked up; None once it has finished."""


@runtime_checkable
class TierStore(Protocol):
    """Answers: where does this prompt's KV lie, below the GPU?"""

    def locate(self, token_ids: Sequence[int], salt: str = "") -> TierHit:
        """What a load of this prompt would bring now. Reads only: no pin, no touch, no load.

        `salt` is the tenant's `cache_salt`; a store that keeps tenants apart finds only what is theirs.
        """

    def transfers(self) -> list[KVTransfer]:
        """The movements since the last call, oldest first."""

    def capacity_tokens(self) -> Mapping[Tier, int]:
        """How many tokens' KV each tier has room for; a tier that is not there is not named."""


@runtime_checkable
class StoreSwitch(Protocol):
    """A store that need not store all that is computed. It starts by storing."""

    def store_from_now(self, wanted: bool) -> None:
        """Store what is computed from now on, or leave it."""

    def stalls(self) -> bool:
        """Whether steps wait for their stores, and nobody else reads them: else storing is never stopped."""


@runtime_checkable
class StepTiming(Protocol):
    """A store for which steps wait. Where two are in flight, the outputs' times do not tell them apart."""

    def waits(self, metadata: Any) -> bool:
        """Whether the step with this metadata of the connector's waits for loads or stores."""

    def step_s(self) -> float | None:
        """What the accelerator took for the step that was reported last; None: not known."""


LoadSelector = Callable[[TurnId, Residency], int]
"""How many of the tokens that the tiers hold of this turn's prompt should be loaded: all of them, the
DRAM stretch, or 0. May be asked at every step while the turn waits; the last answer before it is
placed is the one that counts."""


@runtime_checkable
class SelectiveLoader(Protocol):
    """A connector that need not load all that it has."""

    loads_beside_steps: bool  # false: a step waits for its loads, so they cost everybody's time

    def load_by(self, rule: LoadSelector) -> None:
        """From now on offer vLLM no more tokens than `rule` says. The scheduler calls it once, at its start.

        What is not loaded must be let go of: no pin and no lease may stay behind.
        """
