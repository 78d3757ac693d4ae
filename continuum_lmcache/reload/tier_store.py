"""What a connector that keeps KV outside the GPU tells the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from continuum_lmcache.types import Residency, Tier, TurnId


@dataclass(frozen=True, slots=True)
class TierHit:
    """What the tiers hold of a prompt's head, in the order of loading."""

    dram_tokens: int
    ssd_tokens: int  # those after DRAM's part

    @property
    def tokens(self) -> int:
        return self.dram_tokens + self.ssd_tokens


NOTHING = TierHit(0, 0)


@dataclass(frozen=True, slots=True)
class Prefix:
    """The head of a request's tokens, by all that a store may name KV by."""

    token_ids: Sequence[int]
    block_hashes: Sequence[bytes] = ()  # vLLM's, of the request's full blocks; it may have more than the head
    salt: str = ""  # the tenant's `cache_salt`, which vLLM's hashes include
    adapter: object = None  # the engine's LoRA adapter, which these include too; None: the model itself


@dataclass(frozen=True, slots=True)
class KVTransfer:
    """One timed load of KV from a tier. Stores run beside the steps, and delay none."""

    tier: Tier
    tokens: int
    size_bytes: int
    duration_s: float
    turn: str = ""  # its turn, if the connector knows it: vLLM's request id


LoadSelector = Callable[[TurnId, Residency], int]
"""How many of the tokens that the tiers hold of this turn's prompt to load: all, DRAM's part, or 0.
It may be called at every step while the turn waits; the last answer before an allocation counts."""


def load_all(_: TurnId, where: Residency) -> int:
    """The selector of a store that nobody has given another."""
    return where.dram_tokens + where.ssd_tokens


class TierStore:
    """The base class of a connector that says where KV is. Its defaults are those of a store without tiers.

    A store loads beside the steps. A connector that is not a TierStore counts as no tier.
    """

    mode = "unknown"  # the store's name, for the log and the metrics
    load_selector: LoadSelector = staticmethod(load_all)

    @property
    def is_up(self) -> bool:
        """Whether its KV can be loaded now."""
        return True

    def locate(self, prefix: Prefix) -> TierHit:  # noqa: ARG002
        """What a load of this prefix would return now. Only reads: it pins, touches and loads nothing.

        A store that separates tenants finds only KV of the same salt.
        """
        return NOTHING

    def hit_at_lookup(self, request_id: str) -> TierHit | None:  # noqa: ARG002
        """What was held when a live request was looked up, or more; None where a lookup moves no KV, so that
        `locate` says the same."""
        return None

    def transfers(self) -> list[KVTransfer]:
        """The loads that have ended since the last call, oldest first."""
        return []

    def capacity_tokens(self) -> Mapping[Tier, int]:
        """How many tokens each tier holds before it evicts; a missing tier is not in the mapping."""
        return {}

    def faults(self) -> Mapping[str, int]:
        """How many chunks the tiers have lost so far, by the kind of fault."""
        return {}

    def set_load_selector(self, select: LoadSelector) -> None:
        """Offer vLLM no more tokens than `select` returns. The scheduler calls this once, at its start.

        The connector must release its pins and leases on what is not loaded.
        """
        self.load_selector = select
