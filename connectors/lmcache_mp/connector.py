"""LMCache 0.5.6's multi-process mode as vLLM's KV connector, and as the core's TierStore.

    vLLM: scheduler            vLLM: worker(s)               lmcache server
    tier_mirror.py      <---- changes and lookups, polled every 0.1 s --- server/module.py, lookup_log.py
    tracker.py          ----- lookups, renewed --------------------------> L1 (DRAM), L2 (disk)
                               worker.py <--------- loads, stores ------ shared memory or CUDA IPC

L1 is the core's DRAM tier and L2 its SSD tier. Loads are asynchronous: a request waits for its own load,
other requests continue. A finished turn's blocks are freed when its stores have ended, pinned or not.
docs/lmcache.md describes how it is chosen, and how the server is started.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Mapping
from typing import Any, cast

import torch
from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
from lmcache.v1.multiprocess.token_hasher import TokenHasher
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.lora.request import LoRARequest
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from connectors.kv_names import AdapterNames, WeightsVersion, kv_fingerprint
from connectors.lmcache_mp.autostart import find_server, one_start
from connectors.lmcache_mp.load_join import MpReport
from connectors.lmcache_mp.server.machine import check_machine
from connectors.lmcache_mp.settings import with_defaults
from connectors.lmcache_mp.startup import (
    apply_defaults,
    caller,
    check_layers,
    first_answer,
    translate,
    warn_of_small_l1,
    warn_of_versions,
    windows_of,
)
from connectors.lmcache_mp.tier_mirror import MpTiers, TierPoller
from connectors.lmcache_mp.tracker import ReadLeases, Tracker
from connectors.lmcache_mp.wire import ChangesRequest
from connectors.lmcache_mp.worker import MpWorkerSide
from connectors.request_params import drop_invalid
from connectors.transfer_config import transfer_config
from continuum_lmcache.errors import ConfigError
from continuum_lmcache.reload.cost_model import kv_bytes_per_token
from continuum_lmcache.reload.load_policy import residency_of_offer
from continuum_lmcache.reload.tier_store import KVTransfer, Prefix, TierHit, TierStore
from continuum_lmcache.types import Residency, Tier, TurnId


class ContinuumLMCacheMPConnector(TierStore, LMCacheMPConnector):
    """LMCacheMPConnector that reports where KV is and what loads cost, and outlives its server."""

    mode = "lmcache-mp"

    @classmethod
    def check_settings(cls, vllm_config: VllmConfig, log: bool = True) -> None:
        """Raise ConfigError, one line, for settings that are unknown or known to fail.

        The user's LMCache settings become options of the server in `vllm_config` (translation.py)."""
        if vllm_config.model_config.enable_prompt_embeds:
            raise ConfigError(
                "LMCache 0.5.6 does not tell prompt embeddings apart: it would load one prompt's KV for "
                "another; drop --enable-prompt-embeds or the KV connector"
            )
        check_layers(vllm_config, log)
        translate(vllm_config, log)
        if log:  # before engines start
            check_machine(transfer_config(vllm_config).kv_connector_extra_config)
        extra, _ = with_defaults(transfer_config(vllm_config).kv_connector_extra_config)
        if vllm_config.model_config.enable_sleep_mode and extra.get("lmcache.mp.use_vmm_api"):
            raise ConfigError(
                "after a sleep the KV cache has other memory, and LMCache 0.5.6's server goes on with the "
                "old one; drop --enable-sleep-mode or lmcache.mp.use_vmm_api"
            )

    find_server = staticmethod(find_server)

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        # under another policy, and inside MultiConnector, no other code has checked them
        self.check_settings(vllm_config, log=False)
        apply_defaults(vllm_config, log=role == KVConnectorRole.SCHEDULER)
        self._windows = windows_of(kv_cache_config)
        is_first_worker = role == KVConnectorRole.WORKER and vllm_config.parallel_config.rank == 0
        with one_start(transfer_config(vllm_config).kv_connector_extra_config, is_first_worker):
            super().__init__(vllm_config, role, kv_cache_config)
        self._kv_bytes_per_token = kv_bytes_per_token(kv_cache_config)
        adapter = self.scheduler_adapter if role == KVConnectorRole.SCHEDULER else self.worker_adapter
        adapter.model_name += f"-{kv_fingerprint(vllm_config, kv_cache_config)}"
        if role != KVConnectorRole.SCHEDULER:
            return
        max_model_len = vllm_config.model_config.max_model_len
        _, block_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        (client,) = adapter.req_clients.values()
        request = ChangesRequest(adapter.model_name, adapter.world_size, scheduler=uuid.uuid4().hex)
        self._poller = TierPoller(caller(client), request, self._server_went_down)
        reply = first_answer(self._poller)
        hasher = TokenHasher(adapter.lmcache_tokens_per_chunk, reply.hash_algorithm)
        bytes_per_token = self._kv_bytes_per_token * adapter.world_size
        self._tiers = MpTiers(self._poller, hasher, bytes_per_token, max_model_len, block_tokens)
        self._leases = ReadLeases(adapter, reply.read_lease_s)
        self._version, self._adapters = WeightsVersion(), AdapterNames()
        self._stored_last_step = False
        self._loading: set[str] = set()  # requests whose load the workers have not reported as ended
        self._ended_while_loading: set[str] = set()  # of these, until the workers know that they ended
        warn_of_versions(reply)
        warn_of_small_l1(self._tiers.spare_tokens, max_model_len)
        self._poller.start()

    # ---- scheduler: the core's TierStore

    def locate(self, prefix: Prefix) -> TierHit:
        """What LMCache would load of this prefix now, by the mirror, which is up to POLL_S old. The answer
        holds as long as L1 has room for what a load reads from L2. Prompts with images have other keys, so
        nothing is found for them."""
        salt = self._version.salt(prefix.salt, self._adapters.of(cast("LoRARequest | None", prefix.adapter)))
        return self._tiers.locate(prefix.token_ids, salt, prefix.block_hashes)

    def transfers(self) -> list[KVTransfer]:
        """Loads since the last call, timed by rank 0; reads of L2, timed by the server."""
        return self._tiers.transfers()

    def capacity_tokens(self) -> dict[Tier, int]:
        """This engine's part of the server's L1, and of L2 where L1 has room for its loads."""
        return self._tiers.capacity_tokens()

    def faults(self) -> Mapping[str, int]:
        return self._poller.faults

    def hit_at_lookup(self, request_id: str) -> TierHit | None:
        tracker = self.request_trackers.get(request_id)
        return tracker.hit if tracker is not None else None

    @property
    def is_up(self) -> bool:
        """Whether the server answers and LMCache uses it."""
        return self._poller.is_up and self.scheduler_adapter.is_healthy

    # ---- scheduler: vLLM's calls

    def on_new_request(self, request: Request) -> None:
        """With eager_prefetch the lookup is submitted here, and its lease's age counts from now."""
        drop_invalid(request)
        if self._eager_prefetch and not (request.resumable or request.skip_reading_prefix_cache):
            self._note_lookup(request, self._get_or_create_request_tracker(request))
            super().on_new_request(request)

    def _note_lookup(self, request: Request, tracker: Tracker) -> None:
        self._leases.on_lookup(tracker)
        tracker.hit = tracker.hit or self._locate(request, tracker)

    def _locate(self, request: Request, tracker: Tracker) -> TierHit:
        """Where its KV is. Of an image LMCache's tokens are not vLLM's."""
        block_hashes = () if request.mm_features else request.block_hashes
        return self._tiers.locate(tracker.get_token_ids(), tracker.cache_salt, block_hashes)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tracker = self._tracker_of_these_weights(request)
        if tracker is None:
            return None, True
        if request.skip_reading_prefix_cache:
            # vLLM would ask, and drop the answer, while LMCache would count what it found as computed, and
            # store blocks before they are computed
            return 0, False
        if tracker.loads is not False:
            if self._leases.renew_if_old(tracker):
                return None, True
            has_asked = tracker.asked_s is not None or not tracker.is_waiting
            if has_asked or self._needs_lookup(request, tracker, num_computed_tokens):
                return self._asked(request, tracker, num_computed_tokens)
        # the GPU may hold more now than before; LMCache counts from this number
        align = self._hit_alignment_tokens
        tracker.computes(num_computed_tokens // align * align, tracker.num_stored_tokens)
        return 0, False

    def _asked(self, request: Request, tracker: Tracker, computed_tokens: int) -> tuple[int | None, bool]:
        """LMCache's answer, for which it submits the lookup if that was not done. What it finds beyond the
        mirror is loaded as a whole or not at all."""
        tracker.no_lookup = None
        self._note_lookup(request, tracker)
        if tracker.is_waiting:
            tracker.computes(0, 0)
        found, is_async = super().get_num_new_matched_tokens(request, computed_tokens)
        if not found:
            return found, is_async
        if self._leases.renew_if_old(tracker):
            return None, True  # an eager lookup's answer arrives late
        where = Residency(computed_tokens, found, 0, request.num_tokens)
        if tracker.loads is None and not self.load_selector(TurnId(request.request_id), where):
            self._leases.release(tracker)  # it stays stored: LMCache need not do so again
            tracker.computes(tracker.num_vllm_hit_tokens, tracker.num_stored_tokens)
            tracker.loads = False
            return 0, False
        return found, is_async

    def reset_cache(self) -> bool | None:
        """From now on find, load and store nothing of what was computed before. Waits for nothing.

        LMCache's own reset empties L1 alone, for all its engines.
        """
        if self.role != KVConnectorRole.SCHEDULER:
            return None
        self._version.renew()
        return True

    def on_adapter(self, adapter: LoRARequest) -> None:
        """vLLM loads it now: its files are those that it reads."""
        self._adapters.of(adapter)

    def _is_pure(self, moved: Any) -> bool:
        """Whether these weights computed all KV of the request."""
        return bool(self.request_trackers[moved.request_id].weights == self._version.number)

    def _get_or_create_request_tracker(self, request: Request) -> Tracker:
        tracker = super()._get_or_create_request_tracker(request)
        if not isinstance(tracker, Tracker):
            tracker = Tracker(request, *self._names(request))
            self.request_trackers[request.request_id] = tracker
        return tracker

    def _names(self, request: Request) -> tuple[str, bytes]:
        """The salt of its KV as of now, and the weights' number."""
        salt = self._version.salt(request.cache_salt or "", self._adapters.of(request.lora_request))
        return salt, self._version.number

    def _tracker_of_these_weights(self, request: Request) -> Tracker | None:
        """A waiting request's, begun anew if the weights have changed; None: its lookup must end first."""
        tracker, request_id = self._get_or_create_request_tracker(request), request.request_id
        if tracker.weights != self._version.number and tracker.is_waiting:
            if tracker.asked_s is not None:
                if self.scheduler_adapter.check_lookup_result(request_id) is None:
                    return None
                self._leases.release(tracker)
            self.scheduler_adapter.cleanup_lookup_result(request_id)
            tracker.begin(*self._names(request))
        return tracker

    def _needs_lookup(self, request: Request, tracker: Tracker, computed_tokens: int) -> bool:
        """Whether the tiers hold more of the prompt than the GPU, and to load it pays. Of a part that pays
        the lookup is submitted here.

        The mirror tells, since an answer takes two messages, each of which waits for a step, and the reads of
        L2. A turn whose KV was pinned need not wait for that. Where L2 may hold what the mirror does not
        know, a prompt is looked up unless the GPU has half of it.
        """
        request_id, number = request.request_id, self._tiers.mirror_number
        if number is None:
            return True
        if tracker.no_lookup == (computed_tokens, number):
            return False
        stored = self._locate(request, tracker)
        more_tokens = stored.tokens - computed_tokens
        if more_tokens > 0:
            where = residency_of_offer(stored, computed_tokens, more_tokens, request.num_tokens)
            chosen_tokens = self.load_selector(TurnId(request_id), where)
            tracker.loads = chosen_tokens > 0
            if 0 < chosen_tokens < more_tokens:  # of a lookup that was submitted LMCache submits no other
                self.scheduler_adapter.maybe_submit_lookup_request(
                    request_id,
                    token_ids=tracker.get_token_ids()[: computed_tokens + chosen_tokens],
                    cache_salt=tracker.cache_salt,
                    request_configs=tracker.request_configs,
                    reserve_last_token=self._reserve_last_token_for_lookup,
                )
            if tracker.loads:
                return True
        elif not self._poller.knows_all and 2 * computed_tokens < request.num_tokens:
            return True
        tracker.num_stored_tokens = stored.tokens  # not stored again
        tracker.no_lookup = (computed_tokens, number)
        return False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        tracker = self.request_trackers[request.request_id]
        tracker.asked_s = tracker.returning = tracker.loads = None  # its load, or LMCache, ends the lease
        if num_external_tokens:
            self._loading.add(request.request_id)
        else:
            chunk_tokens = self.scheduler_adapter.lmcache_tokens_per_chunk
            tracker.after_failed_load(request.num_computed_tokens, chunk_tokens)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        for new in scheduler_output.scheduled_new_reqs:
            self.request_trackers[new.req_id].after_more_input(new.num_computed_tokens)
        self._leave_out_windows(scheduler_output)
        meta = super().build_connector_meta(scheduler_output)
        meta.requests = [each for each in meta.requests if each.direction != "STORE" or self._is_pure(each)]
        # vLLM may give a window's blocks to others while a store reads them
        meta.need_flush_before_forward |= self._stored_last_step
        self._stored_last_step = bool(self._windows) and any(
            each.direction == "STORE" for each in meta.requests
        )
        meta.server_is_up = self._poller.is_up  # otherwise the worker would wait to find out
        meta.ended_while_loading = self._ended_while_loading & scheduler_output.finished_req_ids
        self._ended_while_loading -= meta.ended_while_loading
        return meta

    def _leave_out_windows(self, scheduler_output: SchedulerOutput) -> None:
        if not self._windows:
            return
        cached = scheduler_output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        chunk_tokens = self.scheduler_adapter.lmcache_tokens_per_chunk
        for request_id, tokens in computed.items():
            self.request_trackers[request_id].without_windows(tokens, self._windows, chunk_tokens)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        super().update_connector_output(connector_output)
        self._loading -= connector_output.finished_recving or set()
        if isinstance(connector_output.kv_connector_worker_meta, MpReport):
            self._tiers.apply_report(connector_output.kv_connector_worker_meta)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        # without this, a request that ends before its load keeps its chunks locked until the lease ends;
        # a request that was never first in the queue has no tracker, and no lookup
        if tracker := self.request_trackers.get(request.request_id):
            self._leases.release(tracker)
        elif "cached_token_stats" in (request.kv_transfer_params or {}):
            self._get_or_create_request_tracker(request)  # LMCache fails without one
        if request.request_id in self._loading:
            self._ended_while_loading.add(request.request_id)
        is_storing, parameters = super().request_finished(request, block_ids)
        return is_storing, parameters

    def _server_went_down(self) -> None:
        """Send it no requests until LMCache's heartbeat finds it again."""
        for healthy in self.scheduler_adapter._health_events.values():
            healthy.clear()

    # ---- worker: vLLM's calls

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        adapter = self.worker_adapter
        request = ChangesRequest(adapter.model_name, adapter.world_size)
        requested_s = time.monotonic()
        reply = first_answer(TierPoller(caller(adapter.req_client), request))
        has_one_clock = requested_s <= reply.clock_s <= time.monotonic()
        rank = self._vllm_config.parallel_config.rank
        self._worker = MpWorkerSide(
            adapter, rank, self._kv_bytes_per_token, reply.read_lease_s, has_one_clock=has_one_clock
        )

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if getattr(kv_connector_metadata, "need_flush_before_forward", False):
            self._worker.await_stores()
        super().handle_preemptions(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if not cast(Any, connector_metadata).server_is_up:
            self._worker.mark_server_down()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The ended transfers. A request that ended during its load is reported once, after its load.

        LMCache 0.5.6 reports it at once, as stored: vLLM frees blocks that the load still writes, and fails
        on the second report (vllm/v1/core/sched/scheduler.py:3223, 3234).
        """
        self._worker.poll()
        ended_while_loading: set[str] = self._get_connector_metadata().ended_while_loading
        with self._worker.without_giving_up():
            stored, loaded = super().get_finished(finished_req_ids - ended_while_loading)
        return self._worker.stored(stored or set()), loaded

    def wait_for_save(self) -> None:
        """Store what the step computed; nothing if the step fails.

        vLLM also calls this while an exception ends the step, such as SIGTERM's SystemExit. KV that was not
        computed would then be stored under its prompt's key, for every server that shares the store.
        """
        if sys.exc_info()[1] is None:
            super().wait_for_save()

    def build_connector_worker_meta(self) -> MpReport | None:
        return self._worker.report()

    def shutdown(self) -> None:
        if self.role == KVConnectorRole.SCHEDULER:
            self._poller.close()
        if (worker := getattr(self, "_worker", None)) is not None:
            worker.watch.close()
        super().shutdown()
        if worker is not None and (launcher := self.worker_adapter._mp_server_launcher) is not None:
            launcher.shutdown()  # an engine in the user's own process would leave the server behind
