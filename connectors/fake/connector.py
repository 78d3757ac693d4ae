"""A KV connector without LMCache: DRAM and disk in a dict, with sizes, rates and LRU. A test tool.

    {"kv_connector": "FakeConnector", "kv_connector_module_path": "connectors.fake",
     "kv_role": "kv_both", "kv_connector_extra_config": {"fake.dram_gb": 1.0, "fake.ssd_gb": 8.0}}

runs in a real server. The scheduler's side owns the index of both tiers, the worker's side holds the bytes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from connectors.fake.scheduler_side import ChunkCopy, FakeMetadata, FakeSchedulerSide, LoadJob, tiers_of
from connectors.tier_model import ChunkName, Namer, chunk_names
from connectors.transfer_config import transfer_config
from continuum_lmcache.errors import ConfigError, InvariantError
from continuum_lmcache.reload.tier_store import KVTransfer, LoadSelector, Prefix, TierHit, TierStore
from continuum_lmcache.types import Tier


class FakeConnector(TierStore, KVConnectorBase_V1):
    """vLLM's connector interface over `FakeSchedulerSide` or `FakeWorkerSide`, by its role."""

    mode = "fake"
    namer: Namer = staticmethod(chunk_names)

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig, *args: Any
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config, *args)
        self.config = tiers_of(transfer_config(vllm_config).kv_connector_extra_config)
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise ConfigError(f"the model keeps {len(groups)} groups of KV; FakeConnector moves one alone")
        spec = groups[0].kv_cache_spec
        if role == KVConnectorRole.SCHEDULER:
            bytes_per_token = spec.page_size_bytes * len(groups[0].layer_names) // spec.block_size
            self.scheduler_side = FakeSchedulerSide(
                self.config, bytes_per_token, spec.block_size, time.monotonic, self.namer
            )
        else:
            self.worker = FakeWorkerSide()

    # TierStore, in the scheduler

    def locate(self, prefix: Prefix) -> TierHit:
        names = self.namer(prefix.token_ids, self.config.chunk_tokens, prefix.salt, ())
        return self.scheduler_side.store.locate(self.scheduler_side.clock(), names)

    def set_load_selector(self, select: LoadSelector) -> None:
        self.scheduler_side.load_selector = select

    def transfers(self) -> list[KVTransfer]:
        return self.scheduler_side.store.transfers()

    def capacity_tokens(self) -> dict[Tier, int]:
        """The size of each tier; of a tier that several schedulers share, this one's part."""
        store = self.scheduler_side.store
        chunks = {Tier.DRAM: store.dram.capacity, Tier.SSD: store.ssd.capacity}
        return {tier: int(n) * self.config.chunk_tokens for tier, n in chunks.items() if n}

    # the scheduler's side of vLLM's interface

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a lost store is a later miss, and nothing waits for it."""
        return False

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        tokens = self.scheduler_side.offered_tokens(request, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self.scheduler_side.on_alloc(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self.scheduler_side.step(scheduler_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:  # noqa: ARG002
        self.scheduler_side.finished(request.request_id)
        return False, None  # stores end with their step: the blocks are free at once

    def reset_cache(self) -> bool:
        self.scheduler_side.reset()
        return True

    # the worker's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker.register(kv_caches, self._kv_cache_config.num_blocks)

    def start_load_kv(self, *_args: Any, **_kwargs: Any) -> None:
        self.worker.load(self._metadata.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """`start_load_kv` loads whole blocks of all layers: nothing to wait for."""

    def save_kv_layer(self, *_args: Any, **_kwargs: Any) -> None:
        """`wait_for_save` stores whole blocks of all layers at the end of the step."""

    def wait_for_save(self) -> None:
        self.worker.store(self._metadata.stores)
        self.worker.drop(self._metadata.drops)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str]]:  # noqa: ARG002
        return None, self.worker.take_loaded()

    @property
    def _metadata(self) -> FakeMetadata:
        found = self._get_connector_metadata()
        assert isinstance(found, FakeMetadata)
        return found


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
