"""vLLM's own offloading in the simulator: its real connector and manager, with copies that only take time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.outputs import KVConnectorOutput

from connectors.native.connector import ContinuumOffloadingConnector
from connectors.tier_model.bandwidth_link import BandwidthLink
from experiments.sim.clock import Timetable
from experiments.sim.serving import Setup, rates


class LabOffloading(ContinuumOffloadingConnector):
    """Under this name `continuum.*` and `fake.*` keys reach it, as the fake connector's do."""


class Copies:
    """The copies of one engine, each direction one after the other, at the rates of `tiers` (fake.*)."""

    def __init__(self, tiers: Mapping[str, Any], block_bytes: int, timetable: Timetable) -> None:
        self._to_gpu, self._from_gpu = BandwidthLink(tiers["load_gbps"]), BandwidthLink(tiers["store_gbps"])
        self._latency_s, self._block_bytes, self._timetable = tiers["load_latency_s"], block_bytes, timetable
        self._ends_s: dict[int, float] = {}  # of running copies, by job
        self.ended = OffloadingWorkerMetadata()

    def start(
        self, now_s: float, meta: OffloadingConnectorMetadata, is_loaded: Callable[[str], None]
    ) -> float:
        """Start a step's copies. Returns when those have ended that the step must await."""
        for number, job in meta.store_jobs.items():
            self._copy(number, job.src_spec, self._from_gpu, now_s)
        for number, job in meta.load_jobs.items():
            done_s = self._copy(number, job.dst_spec, self._to_gpu, now_s)
            self._timetable.at(done_s, partial(is_loaded, job.req_id))
        return max((self._ends_s.get(number, now_s) for number in meta.jobs_to_flush or ()), default=now_s)

    def output(self, loaded: set[str]) -> KVConnectorOutput | None:
        """What the worker reports, once."""
        ended, self.ended = self.ended, OffloadingWorkerMetadata()
        if not loaded and not ended.completed_jobs:
            return None
        return KVConnectorOutput(finished_recving=loaded or None, kv_connector_worker_meta=ended)

    def _copy(self, number: int, gpu: Any, link: BandwidthLink, now_s: float) -> float:
        size = len(gpu.block_ids) * self._block_bytes
        is_load = link is self._to_gpu
        done_s = link.reserve(now_s, size) + (self._latency_s if is_load else 0.0)
        self._ends_s[number] = done_s
        self._timetable.at(done_s, partial(self._end, number, is_load, size, link.seconds(size)))
        return done_s

    def _end(self, number: int, is_load: bool, size: int, seconds: float) -> None:
        del self._ends_s[number]
        self.ended.mark_completed(number)
        stats = self.ended.transfer_stats
        (stats.load if is_load else stats.store).record(size, seconds)


def copies_of(setup: Setup, timetable: Timetable) -> Copies:
    """Of one engine with this setup."""
    links = {**rates(setup.machine), **(setup.tiers or {})}
    return Copies(links, setup.machine.kv_bytes_per_token * setup.block_tokens, timetable)
