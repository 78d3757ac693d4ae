"""vLLM's own offloading (`--kv-offloading-size`, OffloadingConnector) as the core's TierStore.

The manager of the CPU's chunks lives in the scheduler's process, and is asked by block hash: what it says
holds at that moment, so there is no mirror, no lease and no thread here. The worker's half is vLLM's alone.

Read of vLLM 0.30 to 0.33 (vllm/v1/kv_offload, vllm/distributed/kv_transfer/kv_connector/v1/offloading):
OffloadingConnector.connector_scheduler; its .config.kv_group_configs (tokens_per_chunk, hashes_per_chunk,
group_idx, is_eagle_group, sliding_window_size_in_chunks), .manager, ._req_status (req, max_offload_tokens)
and ._current_batch_jobs_to_flush; CPUOffloadingManager._num_chunks;
OffloadingWorkerMetadata.transfer_stats. CPUOffloadingManager.lookup changes nothing.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, takewhile
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from connectors.transfer_config import transfer_config
from continuum_lmcache.errors import ConfigError
from continuum_lmcache.reload.cost_model import kv_bytes_per_token
from continuum_lmcache.reload.tier_store import NOTHING, KVTransfer, Prefix, TierHit, TierStore
from continuum_lmcache.types import Residency, Tier, TurnId

TRANSFERS_KEPT = 4096  # the oldest are dropped when transfers() is not called
NOBODY = ReqContext(req_id="")
IN_CPU_MEMORY = "CPUOffloadingSpec"


class ContinuumOffloadingConnector(TierStore, OffloadingConnector):
    """OffloadingConnector that reports where KV is and what loads cost, and loads only what pays.

    With several groups of layers, or a sliding window, it reports no tier: vLLM loads all that it finds then.
    """

    mode = "native"

    @classmethod
    def check_settings(cls, vllm_config: VllmConfig) -> None:
        """Store outputs too: next prompts have them. Raises ConfigError for a store that outlives weights."""
        extra = transfer_config(vllm_config).kv_connector_extra_config
        if (spec := extra.get("spec_name", IN_CPU_MEMORY)) != IN_CPU_MEMORY:
            raise ConfigError(
                f"spec_name {spec}: what lies below CPU memory stays there when the weights change, and "
                "would be read; remove it, or take LMCache's server for a disk (docs/lmcache.md)"
            )
        extra.setdefault("offload_prompt_only", False)

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        self.check_settings(vllm_config)  # inside MultiConnector no other code has
        super().__init__(vllm_config, role, kv_cache_config)
        if role != KVConnectorRole.SCHEDULER:
            return
        self._bytes_per_token = kv_bytes_per_token(kv_cache_config)  # of one rank
        groups = self.scheduler.config.kv_group_configs
        self._has_one_group = len(groups) == len(kv_cache_config.kv_cache_groups) == 1
        self._group = groups[0]
        if self._group.is_eagle_group or self._group.sliding_window_size_in_chunks is not None:
            self._has_one_group = False
        self._key_end = self._group.group_idx.to_bytes(4, "big")  # of an OffloadKey, after the block's hash
        self._moved: deque[KVTransfer] = deque(maxlen=TRANSFERS_KEPT)

    # ---- the core's TierStore

    def locate(self, prefix: Prefix) -> TierHit:
        """What vLLM would load of this prefix if the GPU had nothing, exactly. It would await a store that is
        under way."""
        if not self._has_one_group:
            return NOTHING
        lookup, miss = self.scheduler.manager.lookup, LookupResult.MISS
        held = takewhile(lambda key: lookup(key, NOBODY) is not miss, self._keys(prefix))
        return TierHit(sum(1 for _ in held) * self._group.tokens_per_chunk, 0)

    def hit_at_lookup(self, request_id: str) -> TierHit:  # noqa: ARG002
        """There is one tier: whatever is loaded was in it."""
        return TierHit(sys.maxsize, 0)

    def transfers(self) -> list[KVTransfer]:
        """Those of all ranks, each with its own bytes, timed by the GPU without the wait for earlier ones."""
        moved = list(self._moved)
        self._moved.clear()
        return moved

    def capacity_tokens(self) -> dict[Tier, int]:
        manager: Any = self.scheduler.manager
        return {Tier.DRAM: manager._num_chunks * self._group.tokens_per_chunk} if self._has_one_group else {}

    # ---- vLLM's calls, of the scheduler

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """vLLM's answer, or nothing: there is one tier."""
        self._restart(request)
        found, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        where = Residency(num_computed_tokens, found or 0, 0, request.num_tokens)
        if found and self.load_selector(TurnId(request.request_id), where) < found:
            return 0, False
        return found, is_async

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """vLLM fails where a request that a reset has preempted loads in the next step: it has no store to
        await then, since it would wait for that first."""
        for new in scheduler_output.scheduled_new_reqs:
            self._restart(self.scheduler._req_status[new.req_id].req)
        loading = {job.req_id for job in self.scheduler._current_batch_load_jobs.values()}
        if loading & (preempted := scheduler_output.preempted_req_ids or set()):
            scheduler_output = replace(scheduler_output, preempted_req_ids=preempted - loading)
        return super().build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        reported = connector_output.kv_connector_worker_meta
        if isinstance(reported, OffloadingWorkerMetadata):
            load = reported.transfer_stats.load  # their sizes, and the sum of their times
            self._moved += (
                KVTransfer(Tier.DRAM, round(n / self._bytes_per_token), int(n), load.time * n / load.bytes)
                for n in load.sizes
                if n
            )
        super().update_connector_output(connector_output)

    def reset_cache(self) -> bool | None:
        """From now on find and store nothing of what was computed before.

        vLLM stores a live request's KV again after a reset: that of older weights, under names by which
        others would find it. And it refuses a second reset before the next step.
        """
        scheduler = self.scheduler
        flushed, scheduler._current_batch_jobs_to_flush = scheduler._current_batch_jobs_to_flush, set()
        done = super().reset_cache()
        scheduler._current_batch_jobs_to_flush |= flushed
        for status in scheduler._req_status.values():
            if status.req.num_computed_tokens:
                status.max_offload_tokens = 0
        return done

    def _keys(self, prefix: Prefix) -> Iterator[OffloadKey]:
        step = self._group.hashes_per_chunk
        end = len(prefix.token_ids) // self._group.tokens_per_chunk * step
        return (OffloadKey(each + self._key_end) for each in islice(prefix.block_hashes, step - 1, end, step))

    def _restart(self, request: Request) -> None:
        """Forget what no longer holds of a streaming session that has its next input: vLLM up to 0.32 would
        add all its blocks to those it had, and go on with the name of a chunk that had ended with the token
        that the input replaces."""
        status, hashes = self.scheduler._req_status[request.request_id], request.block_hashes
        for group, state in zip(self.scheduler.config.kv_group_configs, status.group_states, strict=True):
            step, names = group.hashes_per_chunk, state.offload_keys
            while names and names[-1][:-4] not in hashes[len(names) * step - 1 : len(names) * step]:
                names.pop()
            state.next_stored_chunk_idx = min(state.next_stored_chunk_idx, len(names))
            state.block_ids.clear()
