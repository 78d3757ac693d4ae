"""Stock in-process LMCache 0.5.6 as vLLM's KV connector, and as the core's TierStore.

It passes every call on to vLLM's LMCacheConnectorV1, and adds:

    settings.py, known_issues.py   refuse settings that fail silently, and set defaults that work
    copies/                        a copy path where there is no GPU; on one, chunks of the right shape;
                                   and a check at the start that what is stored comes back
    disk/                          disk loads that cannot hang or kill the engine
    worker.py, snapshot_rpc.py     which chunks LMCache's tiers admit and evict,
    tier_mirror.py                 mirrored in the scheduler's process
    transfer_timer.py              how long loads and stores took
    load_check.py                  whether everything was loaded that vLLM counts as loaded

With `--scheduling-policy continuum` it replaces vLLM's own `{"kv_connector": "LMCacheConnectorV1", ...}`.
With another policy use `"kv_connector": "ContinuumLMCacheConnector",
"kv_connector_module_path": "connectors.lmcache"`. It works with any scheduler.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, cast

import torch
from lmcache.integration.vllm.utils import mla_enabled
from lmcache.v1.token_database import ChunkedTokenDatabase
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1
from vllm.forward_context import ForwardContext
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from connectors.lmcache.copies.check import refuse_wrong_copies
from connectors.lmcache.copies.on_cpu import BlockCopier, cpu_copy_path
from connectors.lmcache.copies.packed_kv import use_packed_chunks
from connectors.lmcache.known_issues import with_defaults
from connectors.lmcache.load_check import (
    AwaitedLoad,
    LoadCheck,
    with_all_tokens,
    with_attn_metadata,
    written_blocks,
)
from connectors.lmcache.snapshot_rpc import addresses
from connectors.lmcache.startup import apply_defaults, machine, refuse_degraded
from connectors.lmcache.tier_mirror import LMCacheTiers
from connectors.lmcache.transfer_timer import TransferMetrics, TransferStats
from connectors.lmcache.worker import LMCacheWorkerSide, TierReport
from connectors.request_params import drop_invalid
from connectors.transfer_config import refuse_kv_of_more_than_tokens, transfer_config
from continuum_lmcache.capacity.kv_budget import GIB
from continuum_lmcache.reload.load_policy import residency_of_offer
from continuum_lmcache.reload.tier_store import KVTransfer, LoadSelector, TierHit
from continuum_lmcache.types import Tier, TurnId


class ContinuumLMCacheConnector(LMCacheConnectorV1):
    """LMCacheConnectorV1 that reports where KV is and what loads cost, and refuses settings that fail.

    On the scheduler's side it is a continuum_lmcache.reload.tier_store.TierStore.
    """

    mode = "lmcache-in-process"
    is_up = True  # it starts and ends with the worker
    copier: type[BlockCopier] = BlockCopier  # a test replaces it with a broken one

    @classmethod
    def check_settings(cls, vllm_config: VllmConfig) -> None:
        """Raise ConfigError, one line, for LMCache settings that are unknown or known to fail."""
        refuse_kv_of_more_than_tokens(vllm_config)
        extra = transfer_config(vllm_config).kv_connector_extra_config
        with_defaults(extra, os.environ, machine(vllm_config))

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        self.check_settings(vllm_config)  # under another policy no other code has checked them
        apply_defaults(vllm_config, kv_cache_config, log=role == KVConnectorRole.SCHEDULER)
        with cpu_copy_path(self.copier, vllm_config.cache_config.block_size):
            super().__init__(vllm_config, role, kv_cache_config)
        self._impl = cast(Any, self._lmcache_engine)
        refuse_degraded(self._impl)
        # with MLA every rank would hold the same bytes, and LMCache stores them on rank 0 only
        ranks = 1 if mla_enabled(vllm_config.model_config) else vllm_config.parallel_config.world_size
        transfer = transfer_config(vllm_config)
        self._addresses = addresses(str(transfer.engine_id), ranks)
        self._kv_bytes_per_token = machine(vllm_config, kv_cache_config).kv_bytes_per_token
        self._rank = vllm_config.parallel_config.rank
        self._gpu_blocks = kv_cache_config.num_blocks
        self._expected: list[AwaitedLoad] = []  # what vLLM counts as loaded in the next step
        self._check: LoadCheck | None = None
        self._worker: LMCacheWorkerSide | None = None
        self._load_selector: LoadSelector | None = None  # None: load all that is found
        if role == KVConnectorRole.SCHEDULER:
            database = ChunkedTokenDatabase(self._impl.config, self._impl._manager.lmcache_engine_metadata)
            self.tiers = LMCacheTiers(database, self._impl.config.chunk_size, self._addresses)

    # ---- scheduler: the core's TierStore

    async_loads = False  # enable_async_loading is refused: each step waits for its loads

    def locate(self, token_ids: Sequence[int], salt: str = "") -> TierHit:  # noqa: ARG002
        """What LMCache would load of this prompt's head now. Reads only the mirror; never waits.

        The mirror may lack the step in flight, and the disk writes that ended since the last step.
        Chunk hashes are cached, so a second call, also for a longer prompt, is cheap. Prompts with images
        and requests with LMCache tags have other keys, so nothing is found for them. LMCache's in-process
        keys do not contain the salt.
        """
        return self.tiers.locate(token_ids)

    def transfers(self) -> list[KVTransfer]:
        """Loads and stores since the last call, as rank 0 timed them. A load's time includes the copy."""
        return self.tiers.transfers()

    def capacity_tokens(self) -> dict[Tier, int]:
        """The size of LMCache's DRAM and disk on one rank."""
        config = self._impl.config
        gib = {
            Tier.DRAM: config.max_local_cpu_size if config.local_cpu else 0.0,
            Tier.SSD: config.max_local_disk_size if config.local_disk else 0.0,
        }
        return {tier: int(size * GIB / self._kv_bytes_per_token) for tier, size in gib.items() if size}

    def set_load_selector(self, select: LoadSelector) -> None:
        """Load at most what `select` returns (continuum_lmcache.reload.tier_store.SelectiveLoader)."""
        self._load_selector = select

    def waits(self, metadata: Any) -> bool:
        """Whether the step loads or stores (continuum_lmcache.reload.tier_store.StepTiming)."""
        return any(
            (request.load_spec is not None and request.load_spec.can_load)
            or (request.save_spec is not None and request.save_spec.can_save)
            for request in metadata.requests
        )

    def step_s(self) -> float | None:
        """The time of a step that stored something, measured on rank 0's accelerator."""
        return self.tiers.step_s()

    # ---- scheduler: vLLM's calls

    def on_new_request(self, request: Request) -> None:
        drop_invalid(request)
        super().on_new_request(request)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            start = self._impl.load_specs[request.request_id].vllm_cached_tokens
            (block_ids,) = blocks.get_block_ids()
            load = AwaitedLoad(request.request_id, start, start + num_external_tokens, list(block_ids))
            self._expected.append(load)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        meta: Any = super().build_connector_meta(with_all_tokens(scheduler_output))
        trackers, block_tokens = self._impl._request_trackers, self._impl._block_size
        meta.written_blocks = written_blocks(scheduler_output, self._expected, trackers, block_tokens)
        meta.expected_loads, self._expected = self._expected, []
        return meta

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        found, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if request.skip_reading_prefix_cache:  # vLLM asks, and drops the answer
            found = 0
        spec = self._impl.load_specs.get(request.request_id)
        if found and spec is not None:
            # LMCache rounds a capped load down to chunks, but not the number that it returns to vLLM. It then
            # fails on the difference when vLLM's hit ends inside a chunk (vllm_v1_adapter.py:1597)
            found = min(found, spec.lmcache_cached_tokens - spec.vllm_cached_tokens)
            if found > 0 and self._load_selector is not None:
                found = self._chosen(self._load_selector, request, spec, found)
        elif spec is not None and request.num_preemptions:
            # nothing will be loaded, for example of less than min_retrieve_tokens, but LMCache counts it as
            # loaded where a request was preempted, and fails on the difference (vllm_v1_adapter.py:1795)
            spec.lmcache_cached_tokens = min(spec.lmcache_cached_tokens, spec.vllm_cached_tokens)
        return found, is_async

    def _chosen(self, select: LoadSelector, request: Request, spec: Any, found: int) -> int:
        """How many of the `found` tokens `select` wants. LMCache's load spec is reduced to match.

        The worker always gets the spec with the step, and releases the pins of every lookup there, with
        or without a load (vllm_v1_adapter.py:1122). LMCache does not store again what the spec contains. So
        it keeps what DRAM holds (everything found, where nothing stays in DRAM), except for a preempted
        turn: for that LMCache counts everything in the spec as loaded.
        """
        held = self.locate(request.all_token_ids)
        where = residency_of_offer(held, spec.vllm_cached_tokens, found, request.num_tokens)
        wanted = select(TurnId(request.request_id), where)
        if wanted < found:
            known = where.dram_tokens if self._impl.config.local_cpu else found
            kept = wanted if wanted or request.num_preemptions else known
            spec.lmcache_cached_tokens = spec.vllm_cached_tokens + kept
        return min(wanted, found)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[Any, int]:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource  # not in every supported version

        held = self.locate(request.all_token_ids)
        computed_tokens = self._impl.load_specs[request.request_id].vllm_cached_tokens
        if held.dram_tokens + held.ssd_tokens < computed_tokens + num_external_tokens:
            self.tiers.request_snapshot()  # LMCache found more than the mirror has
        host_tokens = min(max(held.dram_tokens - computed_tokens, 0), num_external_tokens)
        split = {CacheHitSource.HOST: host_tokens, CacheHitSource.DISK: num_external_tokens - host_tokens}
        return {source: tokens for source, tokens in split.items() if tokens}

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if not request.output_token_ids:
            # LMCache would read the first token of an aborted request, which has none (vllm_v1_adapter.py)
            (request.kv_transfer_params or {}).pop("ret_first_tok", None)
        return super().request_finished(request, block_ids)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        super().update_connector_output(connector_output)
        if isinstance(connector_output.kv_connector_worker_meta, TierReport):
            self.tiers.apply_report(connector_output.kv_connector_worker_meta)

    # ---- worker: vLLM's calls

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.on_step_start()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        super().start_load_kv(with_attn_metadata(forward_context), **kwargs)  # also in steps without work
        meta = self._get_connector_metadata()  # a warm-up step's has no fields of ours
        if self._check is not None:
            self._check.loaded(getattr(meta, "expected_loads", []), getattr(meta, "written_blocks", []))

    def wait_for_save(self) -> None:
        """Store what the step computed; nothing if the step fails, as in lmcache_mp/connector.py."""
        if sys.exc_info()[1] is not None:
            return
        if self._check is not None:
            meta: Any = self._get_connector_metadata()  # LMCache's, which has no types
            for request in meta.requests:
                if request.save_spec is not None and not self._check.is_whole(request.slot_mapping):
                    request.save_spec.can_save = False
        super().wait_for_save()  # type: ignore[no-untyped-call]  # vLLM's
        if self._worker is not None:
            self._worker.on_step_end()

    def get_block_ids_with_load_errors(self) -> set[int]:
        missing = self._check.missing_blocks() if self._check is not None else set()
        return super().get_block_ids_with_load_errors() | missing

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        engine = self._impl.lmcache_engine
        use_packed_chunks(engine, kv_caches.values())
        super().register_kv_caches(kv_caches)  # LMCache builds its storage here
        refuse_degraded(self._impl)
        refuse_wrong_copies(engine, kv_caches, self._impl._block_size, self._gpu_blocks)
        self._check = LoadCheck(engine, self._impl._block_size)
        if self._rank < len(self._addresses):
            self._worker = LMCacheWorkerSide(engine, self._rank, self._addresses[self._rank])

    def get_kv_connector_stats(self) -> TransferStats | None:
        stats = self._worker.stats() if self._worker else None
        return stats if stats and stats.data else None  # nothing moved in most steps: send nothing

    def build_connector_worker_meta(self) -> TierReport | None:
        return self._worker.report() if self._worker else None

    def shutdown(self) -> None:
        if self.role == KVConnectorRole.SCHEDULER:
            self.tiers.close()
        if self._worker is not None:
            self._worker.close()
            self._impl.shutdown()  # vLLM's connector does not, and LMCache's threads outlive the worker

    # ---- front end: vLLM's calls

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TransferStats:
        return TransferStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> TransferMetrics:
        return TransferMetrics(*args)
