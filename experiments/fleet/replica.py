"""What a router may read: an arrived turn, and the replicas that it could go to."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.request import Request

from connectors.tier_model import TwoTierCache
from experiments.sim.engine import Engine
from experiments.sim.streams import stream_names


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn at the router. `number` is 1 for a program's first."""

    request: Request
    program: str
    number: int
    is_last: bool
    program_arrival_s: float

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def prompt_tokens(self) -> int:
        return self.request.num_prompt_tokens


@dataclass(slots=True)
class Sent:
    """A turn that a replica has not answered yet."""

    turn: Turn
    hit_tokens: int  # of its prompt, when it was sent: on the GPU or in a tier


@dataclass(slots=True)
class Replica:
    """One engine as a router sees it. All figures are exact and current, unlike a real router's."""

    index: int
    engine: Engine
    sent: dict[str, Sent] = field(default_factory=dict)  # by request

    @property
    def scheduler(self) -> Any:
        return self.engine.scheduler

    @property
    def requests(self) -> int:
        """Turns that it has not answered."""
        return len(self.sent)

    @property
    def counted(self) -> int:
        """Requests as vLLM counts them, running and waiting: held turns are among them."""
        return int(sum(self.scheduler.get_request_counts()))

    @property
    def free_tokens(self) -> int:
        """KV that no request and no pin holds."""
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return int(free * self.engine.setup.block_tokens)

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens that it has to compute, for all turns it was sent."""
        total = 0
        for name, sent in self.sent.items():
            request = self.scheduler.requests.get(name)
            known = request.num_computed_tokens if request is not None else 0
            total += max(0, sent.turn.prompt_tokens - max(known, sent.hit_tokens))
        return total

    def hit_tokens(self, turn: Turn) -> int:
        """How much of the turn's prompt it has, on the GPU or in its DRAM, found exactly."""
        return max(self.gpu_hit_tokens(turn), self.dram_hit_tokens(turn))

    def gpu_hit_tokens(self, turn: Turn) -> int:
        """vLLM evicts a prefix from its tail, so the beginning remains."""
        pool, hashes = self.scheduler.kv_cache_manager.block_pool, turn.request.block_hashes
        return self.engine.setup.block_tokens * _leading(
            len(hashes), lambda at: pool.get_cached_block(hashes[at], [0]) is not None
        )

    def dram_hit_tokens(self, turn: Turn) -> int:
        if (store := self.store) is None:
            return 0
        names = chunk_names(turn, store)
        return store.spec.chunk_tokens * _leading(len(names), lambda at: names[at] in store.dram.names)

    @property
    def store(self) -> TwoTierCache | None:
        """Its tiers."""
        connector = self.scheduler.connector
        return connector.scheduler_side.store if connector is not None else None


def chunk_names(turn: Turn, store: TwoTierCache) -> list[Any]:
    """Names of the prompt's whole chunks."""
    return stream_names(turn.request.prompt_token_ids or (), store.spec.chunk_tokens)


def _leading(count: int, is_there: Any) -> int:
    """How many of the first chunks are there; those there are always the first ones."""
    return bisect_left(range(count), True, key=lambda at: not is_there(at))
