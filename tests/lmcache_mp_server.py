"""LMCache's MP server in this process: the real one, with sockets, shared memory and files.

Eviction, which it does once a second, is done when a test calls it, by LMCache's own policies.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lmcache.v1.multiprocess import server as mp_server
from lmcache.v1.multiprocess.cache_control.key_resolver import resolve_object_keys

from connectors.lmcache_mp.wire import MODULE
from experiments.server import reserved_port

MODEL = "m"
CHUNK = 16  # tokens, one vLLM block
PAGE = 4096  # LMCache aligns a chunk in L1 to this
GIB = 1024**3
SPARE_CHUNKS = 32  # L1 beyond what `evict` leaves in it: a turn's stores and reads of L2 need room at once


class MpServer:
    """The real server, in this process."""

    def __init__(self, directory: Path, dram_chunks: int, ssd_chunks: int, *more: str) -> None:
        self.port, self.dram_chunks, self.ssd_chunks = reserved_port(), dram_chunks, ssd_chunks
        l2 = {
            "type": "fs_native",
            "base_path": str(directory),
            "num_workers": 1,
            "max_capacity_gb": 2 * ssd_chunks * PAGE / GIB,
            "eviction": {"eviction_policy": "LRU", "trigger_watermark": 1.0},
        }
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
                *("--eviction-trigger-watermark", "1.0", "--supported-transfer-mode", "engine_driven"),
                *("--shm-name", f"continuum-{os.getpid()}-{self.port}"),
                *("--l2-adapter", json.dumps(l2), "--l2-prefetch-policy", "retain"),
                *("--server-module", json.dumps({"module_path": MODULE})),
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

    def held(self) -> tuple[set[Any], set[Any]]:
        """The keys that L1 and L2 really hold."""
        return set(self.l1._objects), set(self._l2.eviction_policy._order)

    def settle(self) -> None:
        """Wait until no write to L2 is in flight and every session has ended, then evict."""
        wait_for(lambda: not any(self._under_way() or time.sleep(0.001) for _ in range(3)))
        self.evict()

    def evict(self) -> None:
        """Run the server's two eviction loops once, down to these sizes."""
        (l1,) = self.storage._eviction_controllers
        shrink(
            l1._eviction_policy, self.held()[0], self.dram_chunks, self.l1.delete, self.l1.is_key_evictable
        )
        shrink(self._l2.eviction_policy, self.held()[1], self.ssd_chunks, self._l2.adapter.delete)

    def forget(self, token_ids: Sequence[int], kept_tokens: int = 0) -> None:
        context = self._engine.context
        keys, _ = resolve_object_keys(context.token_hasher, MODEL, 1, list(token_ids), "")
        keys = keys[-(-kept_tokens // CHUNK) :]
        self.storage.delete_l1_keys(keys)
        self._l2.adapter.delete([key for key in keys if key in self.held()[1]])

    def close(self) -> None:
        self._server.close()
        self._engine.close()

    @property
    def _l2(self) -> Any:
        (state,) = self.storage._l2_eviction_controller._adapter_states
        return state

    def _under_way(self) -> int:
        stores = self.storage._store_controller.report_status()
        sessions: int = self._engine.context.session_manager.active_count()
        return sessions + stores["pending_keys_count"] + stores["in_flight_task_count"]


def shrink(policy: Any, held: set[Any], room: int, delete: Any, *eligible: Any) -> None:
    """Evict down to `room` keys, as LMCache's policy chooses."""
    if len(held) > room:
        for action in policy.get_eviction_actions((len(held) - room + 1e-6) / len(held), *eligible):
            delete(action.keys)


def wait_for(done: Callable[[], Any], within_s: float = 20.0) -> None:
    """Poll until the condition holds."""
    end_s = time.monotonic() + within_s
    while not done():
        assert time.monotonic() < end_s, "it never came to be so"
        time.sleep(0.001)
