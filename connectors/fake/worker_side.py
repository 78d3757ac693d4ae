"""The worker's side of the fake connector: copies whole KV blocks to a dict and back."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from connectors.fake.config import FakeConfig
from connectors.fake.scheduler_side import ChunkCopy, LoadJob
from connectors.tier_model.lru_tier import ChunkName
from continuum_lmcache.errors import ConfigError, InvariantError
from continuum_lmcache.reload.tier_store import KVTransfer
from continuum_lmcache.types import Tier


@dataclass(slots=True)
class FakeWorkerSide:
    """Holds the bytes of every chunk that any tier has, one tensor [blocks, ...] a layer.

    The layout within a block is private to the attention backend, so only whole blocks are moved.
    """

    config: FakeConfig
    block_tokens: int
    layers: list[torch.Tensor] = field(default_factory=list)  # vLLM's KV, [num_blocks, ...] each
    chunks: dict[ChunkName, list[torch.Tensor]] = field(default_factory=dict)
    loading: dict[str, float] = field(default_factory=dict)  # loads, by when they end
    transfers: list[KVTransfer] = field(default_factory=list)

    def register(self, kv_caches: Mapping[str, torch.Tensor], num_blocks: int) -> None:
        """Keep vLLM's KV tensors. Raises ConfigError for a layout whose first dimension is not blocks."""
        for layer, kv in kv_caches.items():
            if kv.shape[0] != num_blocks:
                raise ConfigError(
                    f"layer {layer} keeps its KV as {tuple(kv.shape)}, which does not begin with the "
                    f"{num_blocks} blocks of the cache; the fake connector cannot move such blocks"
                )
        self.layers = list(kv_caches.values())

    def load(self, jobs: Iterable[LoadJob]) -> None:
        """Fill the GPU's blocks. The loads end later, by the rates, with `sleep`."""
        for job in jobs:
            for tier in (Tier.DRAM, Tier.SSD):
                self._load([c for c in job.copies if c.tier is tier], tier, job.request_id)
            self.loading[job.request_id] = time.monotonic() + job.duration_s * self.config.sleep

    def store(self, copies: Sequence[ChunkCopy]) -> None:
        """Keep a copy of the GPU's blocks."""
        started_s = time.perf_counter()
        for copy in copies:
            index = torch.tensor(copy.block_ids)
            self.chunks[copy.name] = [kv.index_select(0, index.to(kv.device)).cpu() for kv in self.layers]
        self._record(Tier.DRAM, "store", copies, time.perf_counter() - started_s)

    def drop(self, names: Iterable[ChunkName]) -> None:
        """Delete chunks that no tier has any more."""
        for name in names:
            self.chunks.pop(name, None)

    def take_loaded(self) -> set[str]:
        """Requests whose load has ended."""
        now_s = time.monotonic()
        done = {r for r, done_s in self.loading.items() if done_s <= now_s}
        for request_id in done:
            del self.loading[request_id]
        return done

    def take_transfers(self) -> list[KVTransfer]:
        moved, self.transfers = self.transfers, []
        return moved

    def _load(self, copies: Sequence[ChunkCopy], tier: Tier, turn: str) -> None:
        started_s = time.perf_counter()
        for copy in copies:
            if copy.name not in self.chunks:
                raise InvariantError(
                    f"chunk {copy.name!r} is in the scheduler's index, but the worker does not have its bytes"
                )
            if self.config.corrupt:
                continue
            index = torch.tensor(copy.block_ids)
            for kv, saved in zip(self.layers, self.chunks[copy.name], strict=True):
                kv.index_copy_(0, index.to(kv.device), saved[copy.first :].to(kv.device))
        self._record(tier, "load", copies, time.perf_counter() - started_s, turn)

    def _record(
        self, tier: Tier, direction: str, copies: Sequence[ChunkCopy], duration_s: float, turn: str = ""
    ) -> None:
        if copies:
            blocks = sum(len(c.block_ids) for c in copies)
            block_bytes = sum(kv[0].numel() * kv.element_size() for kv in self.layers)
            tokens, size_bytes = blocks * self.block_tokens, blocks * block_bytes
            self.transfers.append(KVTransfer(tier, direction, tokens, size_bytes, duration_s, turn))
