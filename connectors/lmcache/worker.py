"""The worker's side: which chunks LMCache's backends admit and evict, and how long transfers took."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from connectors.lmcache.disk.lost_chunks import LostChunks
from connectors.lmcache.disk.reads import DiskReads, check_disk
from connectors.lmcache.disk.writes import DiskWrites
from connectors.lmcache.snapshot_rpc import Snapshot, SnapshotServer
from connectors.lmcache.transfer_timer import TIERS, DeviceStepTimer, TransferStats, TransferTimer
from continuum_lmcache.reload.tier_store import KVTransfer
from continuum_lmcache.types import Tier


class TierChange(NamedTuple):
    """One chunk entered or left one tier."""

    number: int
    ssd: bool
    admitted: bool
    chunk: int


class ChangeLog:
    """Numbered changes of one worker's tiers. Any thread writes; the worker's step takes them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changes: list[TierChange] = []
        self.last = 0

    def add(self, ssd: bool, admitted: bool, chunk: int) -> None:
        # called under a backend's lock, so it does no more
        with self._lock:
            self.last += 1
            self._changes.append(TierChange(self.last, ssd, admitted, chunk))

    def take(self) -> tuple[int, list[TierChange]]:
        """The changes since the last call, and this call's own number, higher than theirs."""
        with self._lock:
            self.last += 1
            taken, self._changes = self._changes, []
            return self.last, taken


class EvictionListener:
    """Replaces a backend's BatchedMessageSender; passes on to the real one, if there is one."""

    def __init__(self, change_log: ChangeLog, ssd: bool, stock: Any) -> None:
        self._change_log, self._ssd, self._stock = change_log, ssd, stock

    def add_kv_op(self, op_type: Any, key: int) -> None:
        self._change_log.add(self._ssd, op_type.name == "ADMIT", key)
        if self._stock is not None:
            self._stock.add_kv_op(op_type=op_type, key=key)

    def close(self) -> None:
        if self._stock is not None:
            self._stock.close()


class RankReport(NamedTuple):
    """One worker's report after a step."""

    number: int  # of the report, in the ChangeLog's count
    changes: list[TierChange]
    pending_writes: int  # chunks that are being written to disk: not there yet
    transfers: list[KVTransfer]
    since: int = 0  # the number of the report before
    step_s: float | None = None  # of the step, if it waited for a store


@dataclass
class TierReport(KVConnectorWorkerMetadata):
    """The RankReports of a step, by rank."""

    ranks: dict[int, RankReport] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> TierReport:
        assert isinstance(other, TierReport)
        return TierReport({**self.ranks, **other.ranks})


class LMCacheWorkerSide:
    """Observes one LMCache engine: its changes, its transfers, its disk.

    `address` is the snapshot socket. A rank that stores no chunks (MLA) has no LMCacheWorkerSide.
    """

    def __init__(self, engine: Any, rank: int, address: str) -> None:
        self._rank = rank
        self._change_log = ChangeLog()
        self._backends = engine.storage_manager.storage_backends
        self._timer = TransferTimer(engine)
        self._fresh: list[KVTransfer] = []
        self._reported_pending = 0
        self._reported_number = 0  # of the last report
        self._losses = LostChunks()
        self._step_timer = DeviceStepTimer(torch.cuda.is_available())
        self._step_s: float | None = None
        self._listen()
        if disk := self._backends.get("LocalDiskBackend"):
            cpu = self._backends["LocalCPUBackend"]
            DiskReads(disk, DiskWrites(disk, self._losses), self._losses)  # replaces its own
            check_disk(disk, cpu.get_full_chunk_size_bytes())
        self._snapshot_server = SnapshotServer(address, self.snapshot)

    def on_step_start(self) -> None:
        self._step_timer.start()

    def on_step_end(self) -> None:
        """After the step's stores. Without a store the accelerator may still run; nothing waits for it."""
        self._step_s = self._step_timer.seconds() if self._timer.has_stored() else None

    def stats(self) -> TransferStats:
        """What moved and what was lost since the last call, for the metrics. The next report has it too."""
        self._fresh = self._timer.take()
        return TransferStats.of(self._fresh, self._rank, self._losses.take())

    def report(self) -> TierReport | None:
        """Changes and transfers since the last report. Called once a step, after `stats`."""
        pending = self._pending_writes()  # before the changes: a write that ends in between is reported twice
        number, changes = self._change_log.take()
        fresh, self._fresh = self._fresh if self._rank == 0 else [], []
        step_s, self._step_s = self._step_s, None
        if not (changes or fresh or pending != self._reported_pending):
            return None
        self._reported_pending = pending
        since, self._reported_number = self._reported_number, number
        return TierReport({self._rank: RankReport(number, changes, pending, fresh, since, step_s)})

    def snapshot(self) -> Snapshot:
        """All that the tiers hold now. Called from any thread."""
        last = self._change_log.last  # read first, so changes during the copy are reported again
        cpu, disk = self._backends.get("LocalCPUBackend"), self._backends.get("LocalDiskBackend")
        dram = [key.chunk_hash for key in cpu.get_keys()] if cpu is not None else []
        ssd = []
        if disk is not None:
            with disk.disk_lock:
                ssd = [key.chunk_hash for key in disk.dict]
        return Snapshot(self._rank, last, dram, ssd, self._pending_writes())

    def close(self) -> None:
        self._snapshot_server.close()

    def _pending_writes(self) -> int:
        disk = self._backends.get("LocalDiskBackend")
        return len(disk.disk_worker.put_tasks) if disk is not None else 0

    def _listen(self) -> None:
        for name, tier in TIERS.items():
            if backend := self._backends.get(name):
                stock = backend.batched_msg_sender
                backend.batched_msg_sender = EvictionListener(self._change_log, tier is Tier.SSD, stock)
