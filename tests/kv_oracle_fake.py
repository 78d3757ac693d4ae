"""The simulator's fake connector on the oracle's GPU: both halves are the real ones, and move names of KV."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from bench import BLOCK
from kv_oracle import OracleBench
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

CHUNK = 32  # tokens; two blocks
BYTES_PER_TOKEN = 8  # of the bench's one layer
CHUNKS = 20  # that its DRAM has room for


class FakeBench(OracleBench):
    """The oracle with the fake connector. `settings` are its own."""

    connector, module = "FakeConnector", "connectors.fake"

    def __init__(self, *args: Any, chunk: int = CHUNK, settings: Any = None, **more: Any) -> None:
        size_gb = CHUNKS * chunk * BYTES_PER_TOKEN / 2**30
        self.settings = {"fake.chunk_tokens": chunk, "fake.dram_gb": size_gb, **(settings or {})}
        self.lmcache = SimpleNamespace(loads=0, lost=0, losing=0, lag=0, evict=self._evict)
        super().__init__(*args, **more)

    def new_slots(self, blocks: int) -> Any:
        self._kv = torch.zeros(blocks, BLOCK, dtype=torch.int64)
        return self._kv.view(-1).numpy()  # of the same memory

    def join(self) -> Any:
        scheduler = self.scheduler
        scheduler.connector.scheduler_side.clock = lambda: self.now_s
        worker = type(scheduler.connector)(
            scheduler.vllm_config, KVConnectorRole.WORKER, scheduler.kv_cache_config
        )
        worker.register_kv_caches({"layer": self._kv})
        self._load, worker.start_load_kv = worker.start_load_kv, self._load_and_count
        self._worker = worker
        return worker

    def spoilt(self) -> list[str]:
        return []

    def _load_and_count(self, *args: Any, **kwargs: Any) -> None:
        self.lmcache.loads += len(self._worker._metadata.loads)
        self._load(*args, **kwargs)

    def _evict(self, every: int) -> None:  # noqa: ARG002
        self.scheduler.connector.reset_cache()
