"""The scheduler's side of the fake connector: which chunks each step loads, stores and drops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from connectors.tier_model import ActiveLoad, ChunkName, Namer, TierSpec, TwoTierCache, chunk_names
from continuum_lmcache.config import parsed, refuse_unknown, require
from continuum_lmcache.errors import InvariantError
from continuum_lmcache.reload.load_policy import residency_of_offer
from continuum_lmcache.reload.tier_store import LoadSelector, load_all
from continuum_lmcache.types import Tier, TurnId

PREFIX = "fake."


def tiers_of(extra: Mapping[str, Any]) -> TierSpec:
    """By a connector's extra config; ignores keys without the prefix. Raises ConfigError."""
    kinds = {f.name: str(f.type) for f in fields(TierSpec)}
    given = {k.removeprefix(PREFIX): v for k, v in extra.items() if k.startswith(PREFIX)}
    refuse_unknown(given, kinds, PREFIX, "kv_connector_extra_config")
    return TierSpec(**{k: parsed(PREFIX + k, value, kinds[k]) for k, value in given.items()})


@dataclass(frozen=True, slots=True)
class ChunkCopy:
    """One chunk, and the GPU blocks that hold its tokens [first * block, chunk_tokens)."""

    name: ChunkName
    tier: Tier  # the source; a store goes to all tiers
    first: int  # of the chunk's blocks; those before it are on the GPU already
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadJob:
    request_id: str
    copies: tuple[ChunkCopy, ...]
    duration_s: float  # by the rates, with the wait for the link


@dataclass
class FakeMetadata(KVConnectorMetadata):
    """One step's work for the workers, in this order."""

    loads: list[LoadJob]
    stores: list[ChunkCopy]
    drops: list[ChunkName]


@dataclass(slots=True)
class TrackedRequest:
    """A request, from its first lookup until its end."""

    request: Request
    names: list[ChunkName] = field(default_factory=list)  # of its whole chunks
    block_ids: list[int] = field(default_factory=list)
    stored_chunks: int = 0  # leading chunks that need no store any more
    offered: bool = False  # looked up, and not allocated yet
    gpu_tokens: int = 0  # found on the GPU at the lookup
    is_stale: bool = False  # its blocks have KV of before the tiers were emptied: none of it is stored


class FakeSchedulerSide:
    """Owns the index of both tiers and, for each live request, how much of it is stored."""

    def __init__(
        self,
        config: TierSpec,
        bytes_per_token: int,
        block_tokens: int,
        clock: Callable[[], float],
        namer: Namer = chunk_names,
    ) -> None:
        self.config, self.block_tokens, self.clock, self.namer = config, block_tokens, clock, namer
        self.store = TwoTierCache(config, bytes_per_token)
        require(
            config.chunk_tokens % block_tokens == 0,
            "fake.chunk_tokens",
            config.chunk_tokens,
            f"a multiple of the engine's blocks of {block_tokens} tokens: only whole blocks are moved",
        )
        self.blocks_per_chunk = config.chunk_tokens // block_tokens
        self.tracked: dict[str, TrackedRequest] = {}
        self.load_selector: LoadSelector = load_all
        self._loads: list[LoadJob] = []

    def offered_tokens(self, request: Request, gpu_tokens: int) -> int:
        """How many tokens after the first `gpu_tokens` a load would return. Changes no tier."""
        seen = self.tracked.setdefault(request.request_id, TrackedRequest(request))
        seen.offered, seen.gpu_tokens = True, gpu_tokens
        seen.block_ids, seen.is_stale = [], False  # it has none, or no longer
        held = self.store.locate(self.clock(), self._named(seen))
        # the last token is always computed, since the next one is sampled from it
        found = min(held.tokens, request.num_tokens - 1) - gpu_tokens
        if found <= 0:
            return 0
        where = residency_of_offer(held, gpu_tokens, found, request.num_tokens)
        return self.load_selector(TurnId(request.request_id), where)

    def on_alloc(self, request: Request, block_ids: Sequence[int], load_tokens: int) -> None:
        """The request got its blocks, and loads `load_tokens` of the offered tokens."""
        seen = self.tracked.get(request.request_id)
        if seen is None or not seen.offered:
            return  # the second call, after the load
        seen.offered = False
        chunk_tokens, now_s = self.config.chunk_tokens, self.clock()
        held = self.store.locate(now_s, seen.names)
        seen.stored_chunks = held.tokens // chunk_tokens
        end_chunk = -(-(seen.gpu_tokens + load_tokens) // chunk_tokens)
        if end_chunk < seen.stored_chunks:  # the rest is computed, and stored to DRAM if it is not there
            seen.stored_chunks = max(held.dram_tokens // chunk_tokens, end_chunk)
        if load_tokens == 0:
            self.store.touch(now_s, seen.names)
            return
        if end_chunk > seen.stored_chunks:
            raise InvariantError(f"offered chunks({end_chunk}) > held chunks({seen.stored_chunks})")
        loading = self.store.load(now_s, seen.names[:end_chunk], seen.gpu_tokens, request.request_id)
        copies = self._copies_of(loading, seen.gpu_tokens, block_ids)
        seen.block_ids = list(block_ids)  # no step of its own may tell them for long
        self._loads.append(LoadJob(request.request_id, copies, loading.done_s - now_s))

    def step(self, output: SchedulerOutput) -> FakeMetadata:
        self._note_blocks(output)
        stores = []
        for request_id, scheduled_tokens in output.num_scheduled_tokens.items():
            if (seen := self.tracked.get(request_id)) and not seen.is_stale:
                stores += self._stores_of(seen, scheduled_tokens)
        loads, self._loads = self._loads, []
        return FakeMetadata(loads, stores, self.store.take_evicted())

    def reset(self) -> None:
        """Empty the tiers, perhaps since the weights are others: what requests hold is not stored."""
        self.store.clear()
        for seen in self.tracked.values():
            seen.is_stale = bool(seen.block_ids)

    def finished(self, request_id: str) -> None:
        self.tracked.pop(request_id, None)

    def _named(self, seen: TrackedRequest) -> list[ChunkName]:
        """Names of the request's whole chunks; none where KV depends on more than the token ids."""
        request, chunk_tokens = seen.request, self.config.chunk_tokens
        is_text = request.lora_request is None and not request.mm_features
        if is_text and request.num_tokens // chunk_tokens > len(seen.names):
            salt = request.cache_salt or ""
            seen.names = self.namer(request.all_token_ids, chunk_tokens, salt, seen.names)
        return seen.names

    def _copies_of(
        self, loading: ActiveLoad, gpu_tokens: int, block_ids: Sequence[int]
    ) -> tuple[ChunkCopy, ...]:
        first_chunk, span = gpu_tokens // self.config.chunk_tokens, self.blocks_per_chunk
        tiers = [Tier.DRAM] * len(loading.dram) + [Tier.SSD] * len(loading.ssd)
        copies = []
        for at, name in enumerate([*loading.dram, *loading.ssd]):
            start = (first_chunk + at) * span
            skip = max(0, gpu_tokens // self.block_tokens - start)
            copies.append(ChunkCopy(name, tiers[at], skip, tuple(block_ids[start + skip : start + span])))
        return tuple(copies)

    def _stores_of(self, seen: TrackedRequest, scheduled_tokens: int) -> list[ChunkCopy]:
        request, span = seen.request, self.blocks_per_chunk
        end = min(request.num_computed_tokens + scheduled_tokens, request.num_tokens)
        end_chunk = end // self.config.chunk_tokens
        if end_chunk <= seen.stored_chunks:
            return []
        names = self._named(seen)
        chunks = {names[i]: i for i in range(seen.stored_chunks, min(end_chunk, len(names)))}
        seen.stored_chunks = end_chunk
        at = seen.block_ids
        return [
            ChunkCopy(n, Tier.DRAM, 0, tuple(at[chunks[n] * span : (chunks[n] + 1) * span]))
            for n in self.store.store(self.clock(), list(chunks))
        ]

    def _note_blocks(self, output: SchedulerOutput) -> None:
        for new in output.scheduled_new_reqs:
            if seen := self.tracked.get(new.req_id):
                seen.block_ids = list(new.block_ids[0])
        cached = output.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if (seen := self.tracked.get(request_id)) and block_ids is not None:
                resumed = request_id in cached.resumed_req_ids  # then these are all of them
                seen.block_ids = [*(() if resumed else seen.block_ids), *block_ids[0]]
                seen.is_stale &= not resumed  # it computes all of them again
