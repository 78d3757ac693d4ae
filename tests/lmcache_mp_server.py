"""LMCache's MP server in this process: the real one, with sockets, shared memory and files.

Eviction, which it does once a second, is done when a test calls it, by LMCache's own policies.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import _filename_to_object_key
from lmcache.v1.multiprocess import server as mp_server
from lmcache.v1.multiprocess.cache_control.key_resolver import resolve_object_keys
from waiting import PATIENCE_S, wait_for

from connectors.lmcache_mp.tier_mirror import Call
from connectors.lmcache_mp.wire import MODULE
from connectors.lmcache_mp.worker import MpWorkerSide
from experiments.server import reserved_port

MODEL = "m"
CHUNK = 16  # tokens, one vLLM block
PAGE = 4096  # LMCache aligns a chunk in L1 to this
GIB = 1024**3
SPARE_CHUNKS = 32  # L1 beyond what `evict` leaves in it: a turn's stores and reads of L2 need room at once
NO_CHUNK = ObjectKey(b"no chunk", MODEL, ObjectKey.ComputeKVRank(1, 0, 1, 0))


def patient(call: Call) -> Call:
    """Waits longer for an answer than ANSWER_S: this process may stand still, and the server with it."""
    return lambda payload, _: call(payload, PATIENCE_S)


class PatientWorker(MpWorkerSide):
    """Waits longer for a store or load than STALL_S, while it `is_patient`."""

    is_patient = True

    def _prepare_submit(self) -> float:
        start_s = super()._prepare_submit()
        if self.is_patient:
            self._adapter.transfer_ctx.engine_driven_context.mq_timeout = PATIENCE_S
        return start_s


class MpServer:
    """The real server, in this process."""

    def __init__(
        self,
        directory: Path,
        dram_chunks: int,
        ssd_chunks: int,
        *more: str,
        watermark: float = 1.0,
        kind: str = "fs_native",
        server_module: str = json.dumps({"module_path": MODULE}),
    ) -> None:
        """`watermark`: the share of both tiers above which LMCache's own loops evict too; `kind`: of L2."""
        self.port, self.dram_chunks, self.ssd_chunks = reserved_port(), dram_chunks, ssd_chunks
        self.directory = directory
        l2 = {"type": kind, "base_path": str(directory)} | {
            "fs": {},
            "fs_native": {
                "num_workers": 1,
                "max_capacity_gb": 2 * ssd_chunks * PAGE / GIB,
                "eviction": {"eviction_policy": "LRU", "trigger_watermark": watermark},
            },
        }[kind]
        parser = argparse.ArgumentParser()
        for add in (
            mp_server.add_mp_server_args,
            mp_server.add_storage_manager_args,
            mp_server.add_observability_args,
            mp_server.add_coordinator_args,
        ):
            add(parser)
        size_gib = (dram_chunks + SPARE_CHUNKS) * PAGE / GIB
        args = parser.parse_args(
            [
                *("--host", "127.0.0.1", "--port", str(self.port), "--chunk-size", str(CHUNK)),
                *("--l1-size-gb", str(size_gib), "--eviction-policy", "LRU"),
                *("--eviction-trigger-watermark", str(watermark)),
                *("--supported-transfer-mode", "engine_driven"),
                *("--shm-name", f"continuum-{os.getpid()}-{self.port}"),
                *("--l2-adapter", json.dumps(l2), "--l2-prefetch-policy", "retain"),
                *("--server-module", server_module),
                *("--worker-reap-timeout-seconds", "0"),  # never: a rig's worker sends no pings
                *more,
            ]
        )
        started = mp_server.run_cache_server(
            mp_server.parse_args_to_mp_server_config(args),
            mp_server.parse_args_to_config(args),
            mp_server.parse_args_to_observability_config(args),
            return_engine=True,
            start_prometheus_http_server=False,
            coordinator_config=mp_server.parse_args_to_coordinator_config(args),
        )
        assert started is not None
        self._server, self._engine = started
        self.storage = self._engine.storage_manager
        (self.l1,) = self.storage._l1_managers_by_id.values()
        self._submitting = False  # keys of L1 that are on their way to L2, between two of LMCache's tables
        self._watch_submissions()

    def held(self) -> tuple[set[Any], set[Any]]:
        """The keys that L1 and L2 really hold."""
        files = map(_filename_to_object_key, (file.name for file in self.directory.iterdir()))
        in_l2 = set(self._l2[0].eviction_policy._order) if self._l2 else {key for key in files if key}
        return set(self.l1._objects), in_l2

    def clear_l1(self) -> None:
        """Drop all of L1; L2 keeps what it has."""
        self.storage.delete_l1_keys(self.held()[0])

    def settle(self) -> None:
        """Wait until no write to L2 is in flight and every session has ended, then evict."""
        wait_for(lambda: not self._under_way())
        self._adapter.delete([NO_CHUNK])  # returns once L2 has told its listeners of all before
        self.evict()

    def evict(self) -> None:
        """Run the server's two eviction loops once, down to these sizes."""
        (l1,) = self.storage._eviction_controllers
        shrink(
            l1._eviction_policy, self.held()[0], self.dram_chunks, self.l1.delete, self.l1.is_key_evictable
        )
        for l2 in self._l2:
            shrink(l2.eviction_policy, self.held()[1], self.ssd_chunks, l2.adapter.delete)

    def forget(self, token_ids: Sequence[int], kept_tokens: int = 0) -> None:
        context = self._engine.context
        keys, _ = resolve_object_keys(context.token_hasher, MODEL, 1, list(token_ids), "")
        keys = keys[-(-kept_tokens // CHUNK) :]
        self.storage.delete_l1_keys(keys)
        self._adapter.delete([key for key in keys if key in self.held()[1]])

    def drop_workers(self) -> None:
        """Drop every worker, as those that have sent no heartbeat for `--worker-reap-timeout-seconds`."""
        for module in self._engine._modules:
            if hasattr(module, "reap_stale_instances"):
                module.reap_stale_instances(-1.0, -1.0)

    def close(self) -> None:
        self._server.close()
        self._engine.close()

    @property
    def _l2(self) -> list[Any]:
        """Of an L2 that evicts, LMCache's state of that; `fs` evicts nothing."""
        return list(self.storage._l2_eviction_controller._adapter_states)

    @property
    def _adapter(self) -> Any:
        ((_, adapter),) = self.storage.l2_adapters()
        return adapter

    def _under_way(self) -> bool:
        """Looks at the tables in the order in which a key goes through them."""
        sessions: int = self._engine.context.session_manager.active_count()
        store = self.storage._store_controller
        return bool(
            sessions
            or store.report_status()["pending_keys_count"]
            or self._submitting
            or store.report_status()["in_flight_task_count"]
        )

    def _watch_submissions(self) -> None:
        """LMCache's thread takes keys out of the first table before it puts them into the second."""
        store = self.storage._store_controller
        take, submit = store._listener.pop_pending_keys, store._process_new_keys

        def taken() -> list[ObjectKey]:
            self._submitting = True
            keys: list[ObjectKey] = take()
            self._submitting = bool(keys)
            return keys

        def submitted(keys: list[ObjectKey]) -> None:
            try:
                submit(keys)
            finally:
                self._submitting = False

        store._listener.pop_pending_keys, store._process_new_keys = taken, submitted


def shrink(policy: Any, held: set[Any], room: int, delete: Any, *eligible: Any) -> None:
    """Evict down to `room` keys, as LMCache's policy chooses."""
    if len(held) > room:
        for action in policy.get_eviction_actions((len(held) - room + 1e-6) / len(held), *eligible):
            delete(action.keys)
