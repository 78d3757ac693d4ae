"""The worker's side of the fake connector: copies whole KV blocks to a dict and back."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from connectors.fake.scheduler_side import ChunkCopy, LoadJob
from connectors.tier_model import ChunkName
from continuum_lmcache.errors import ConfigError, InvariantError


@dataclass(slots=True)
class FakeWorkerSide:
    """Holds the bytes of every chunk that any tier has, one tensor [blocks, ...] a layer.

    The layout within a block is private to the attention backend, so only whole blocks are moved.
    """

    layers: list[torch.Tensor] = field(default_factory=list)  # vLLM's KV, [num_blocks, ...] each
    chunks: dict[ChunkName, list[torch.Tensor]] = field(default_factory=dict)
    loading: dict[str, float] = field(default_factory=dict)  # loads, by when they end

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
        """Fill the GPU's blocks. The loads end later, by the rates."""
        for job in jobs:
            for copy in job.copies:
                self._load(copy)
            self.loading[job.request_id] = time.monotonic() + job.duration_s

    def store(self, copies: Iterable[ChunkCopy]) -> None:
        for copy in copies:
            index = torch.tensor(copy.block_ids)
            self.chunks[copy.name] = [kv.index_select(0, index.to(kv.device)).cpu() for kv in self.layers]

    def drop(self, names: Iterable[ChunkName]) -> None:
        for name in names:
            self.chunks.pop(name, None)

    def take_loaded(self) -> set[str]:
        now_s = time.monotonic()
        done = {r for r, done_s in self.loading.items() if done_s <= now_s}
        for request_id in done:
            del self.loading[request_id]
        return done

    def _load(self, copy: ChunkCopy) -> None:
        if copy.name not in self.chunks:
            raise InvariantError(
                f"chunk {copy.name!r} is in the scheduler's index, but the worker does not have its bytes"
            )
        index = torch.tensor(copy.block_ids)
        for kv, saved in zip(self.layers, self.chunks[copy.name], strict=True):
            kv.index_copy_(0, index.to(kv.device), saved[copy.first :].to(kv.device))
