"""vLLM's real scheduler, with both halves of a real LMCache connector around it; no model runs.

The scheduler builds its half as an engine does; the worker's half is built beside it and is driven with each
step as vLLM's model runner drives it. An MP bench has the real server in this process.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench import BLOCK, Bench
from lmcache_mp_rig import Clock
from lmcache_mp_server import PAGE, MpServer, PatientWorker, patient
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput
from waiting import PATIENCE_S

from connectors.lmcache_mp import connector as mp_connector
from connectors.lmcache_mp.connector import ContinuumLMCacheMPConnector
from connectors.lmcache_mp.startup import caller

LAYERS, HEADS, HEAD = 8, 4, 64  # of the small model
CHUNK_BYTES = BLOCK * LAYERS * HEADS * 2 * HEAD * 2
CHUNKS = 200  # that a tier has room for
GIB = 1024**3


class LMCacheBench(Bench):
    """A bench whose steps also go through a worker's half."""

    connector_cls: Any

    def __init__(self, scheduler_cls: Any, model: Path, blocks: int, **extra: Any) -> None:
        transfer = {
            "kv_connector": self.connector_cls.__name__,
            "kv_connector_module_path": self.connector_cls.__module__,
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
        super().__init__(scheduler_cls, model, blocks, budget_tokens=256, transfer=transfer)
        config, caches = self.scheduler.vllm_config, self.scheduler.kv_cache_config
        config.cache_config.kv_cache_layout = "LBHNC"  # the CPU's, which the engine core resolves
        with set_current_vllm_config(config):
            self.worker = self.connector_cls(config, KVConnectorRole.WORKER, caches)
        names = [f"layer.{i}" for i in range(LAYERS)]
        caches.kv_cache_groups[0].layer_names[:] = names
        self.kv = {name: torch.zeros(blocks, HEADS, BLOCK, 2 * HEAD, dtype=torch.bfloat16) for name in names}
        self.worker.register_kv_caches(self.kv)

    def step(self, seconds: float | None = None) -> int:
        tokens = super().step(seconds)
        if not tokens:
            time.sleep(0.001)  # a lookup's answer comes in real time
        return tokens

    def run_until_idle(self, max_steps: int = 100_000) -> None:
        super().run_until_idle(max_steps)  # a busy machine takes many idle steps for one answer

    def moved(self, output: Any) -> KVConnectorOutput:
        """Handle a step's metadata as vLLM's model runner does, and return its report."""
        worker, meta = self.worker, output.kv_connector_metadata
        worker.handle_preemptions(meta)
        worker.bind_connector_metadata(meta)
        worker.start_load_kv(SimpleNamespace(attn_metadata={"layer.0": object()}))
        worker.wait_for_save()
        results = worker.get_transfer_results(output.finished_req_ids)
        result = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_stats=worker.get_kv_connector_stats(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        return result

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()


class MpBench(LMCacheBench):
    """LMCache's MP server in this process. If it stands still for a while, nobody takes it for dead."""

    connector_cls = ContinuumLMCacheMPConnector

    def __init__(self, scheduler_cls: Any, model: Path, blocks: int, directory: Path) -> None:
        pages = CHUNKS * CHUNK_BYTES // PAGE
        self.server = MpServer(directory, pages, pages)
        extra = {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": self.server.port,
            "lmcache.mp.heartbeat_interval": PATIENCE_S,
            "lmcache.mp.mq_timeout": 10 * PATIENCE_S,
        }
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(mp_connector, "caller", lambda client: patient(caller(client)))
            patched.setattr(mp_connector, "MpWorkerSide", PatientWorker)
            super().__init__(scheduler_cls, model, blocks, **extra)
        self.scheduler.connector._poller._clock = Clock()  # the mirror is never too old

    def run_until_idle(self) -> None:
        super().run_until_idle()
        self.scheduler.connector._poller.poll()  # what was stored is known now, not 0.1 s later

    def close(self) -> None:
        super().close()
        self.server.close()
