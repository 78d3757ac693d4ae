"""What LMCache's loads and stores cost: timed in the worker, where the engine's step waits for them.

A load is one `retrieve` of one request: reads from a tier (`StorageManager.batched_get`, whose
`location` is the tier), then one copy of everything to the GPU, which LMCache's CUDA connectors
synchronise before they return. The copy's time is divided by bytes, so each tier's seconds are the time
of its bytes from the tier to the GPU. A store is the synchronous part of one `store`: the
copy to DRAM and the hand-over to the disk's writer.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from prometheus_client import REGISTRY
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from connectors.lmcache.disk.lost_chunks import CAUSES
from continuum_lmcache.reload.tier_store import KVTransfer
from continuum_lmcache.types import Tier

TIERS = {"LocalCPUBackend": Tier.DRAM, "LocalDiskBackend": Tier.SSD}
COUNTERS = {  # name without "continuum_" and "_total" -> what it counts
    "loaded_tokens": "Tokens whose KV was loaded from a tier below the GPU.",
    "loaded_bytes": "Bytes of KV loaded from a tier below the GPU, all ranks.",
    "load_seconds": "Seconds in which a step waited for loads from a tier, as rank 0 timed them.",
    "stored_bytes": "Bytes of KV stored below the GPU, all ranks.",
    "store_seconds": "Seconds in which a step waited for stores, as rank 0 timed them.",
    "lost_chunks": "Chunks that the disk tier could not store or return, by cause, all ranks.",
}
BY_TIER = dict.fromkeys(("loaded_tokens", "loaded_bytes", "load_seconds"), "tier")
LABELS = BY_TIER | {"lost_chunks": "cause"}  # counters with a label of their own


class TransferTimer:
    """Times one LMCache engine's loads and stores by wrapping four of its methods."""

    def __init__(self, engine: Any, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._reads: list[KVTransfer] = []
        self._elsewhere: list[tuple[int, float]] = []  # bytes and seconds of reads from no tier of ours
        self._puts: list[tuple[int, int]] = []
        self._done: list[KVTransfer] = []
        store = engine.storage_manager
        self._retrieve, engine.retrieve = engine.retrieve, self.retrieve
        self._store, engine.store = engine.store, self.store
        self._get, store.batched_get = store.batched_get, self.batched_get
        self._put, store.batched_put = store.batched_put, self.batched_put

    def take(self) -> list[KVTransfer]:
        """The transfers since the last call, oldest first."""
        done, self._done = self._done, []
        return done

    def has_stored(self) -> bool:
        """Whether anything was stored since the last `take`; LMCache has then waited for the copy."""
        return any(done.direction == "store" for done in self._done)

    def retrieve(self, *args: Any, **kwargs: Any) -> Any:
        self._reads.clear()
        self._elsewhere.clear()
        start_s = self._clock()
        found = self._retrieve(*args, **kwargs)
        loads = with_copy(self._reads, self._clock() - start_s, self._elsewhere)
        self._done += [replace(load, turn=kwargs.get("req_id") or "") for load in loads]
        return found

    def batched_get(self, keys: Any, location: str | None = None) -> Any:
        start_s = self._clock()
        chunks = self._get(keys=keys, location=location)
        took_s, read = self._clock() - start_s, sizes(chunks)
        if tier := TIERS.get(location or ""):
            self._reads.append(moved(tier, "load", read, took_s))
        else:
            self._elsewhere.append((sum(size_bytes for _, size_bytes in read), took_s))
        return chunks

    def store(self, *args: Any, **kwargs: Any) -> None:
        self._puts.clear()
        start_s = self._clock()
        self._store(*args, **kwargs)
        if self._puts:
            self._done.append(moved(Tier.DRAM, "store", self._puts, self._clock() - start_s))

    def batched_put(self, keys: Any, memory_objs: Any, *args: Any, **kwargs: Any) -> None:
        self._puts += sizes(memory_objs)  # before the put may free them
        self._put(keys, memory_objs, *args, **kwargs)


class DeviceStepTimer:
    """The accelerator's time since a step's beginning, by CUDA events where there is a GPU."""

    def __init__(self, on_gpu: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        self._on_gpu, self._clock = on_gpu, clock
        self._start: Any = None

    def start(self) -> None:
        """Work launched before is not counted, though a GPU may still run it."""
        self._start = self._now()

    def seconds(self) -> float | None:
        """The time since `start`. Waits for all launched work, so call it when that has ended."""
        began, self._start = self._start, None
        if began is None:
            return None
        ended = self._now()
        if not self._on_gpu:
            return float(ended - began)
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1000.0

    def _now(self) -> Any:
        if not self._on_gpu:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
        event.record()
        return event


def sizes(chunks: Iterable[Any]) -> list[tuple[int, int]]:
    """(tokens, bytes) of the chunks found; None is a missing chunk."""
    return [(chunk.get_num_tokens(), chunk.get_size()) for chunk in chunks if chunk is not None]


def moved(tier: Tier, direction: str, sizes: list[tuple[int, int]], duration_s: float) -> KVTransfer:
    """One KVTransfer of chunks of these sizes."""
    return KVTransfer(tier, direction, sum(t for t, _ in sizes), sum(b for _, b in sizes), duration_s)


def with_copy(
    reads: Iterable[KVTransfer], total_s: float, elsewhere: Sequence[tuple[int, float]] = ()
) -> list[KVTransfer]:
    """The reads of one load that returned chunks; the rest of the load's time is divided by bytes.

    Reads `elsewhere` (bytes, seconds), from a remote backend or a peer, get their share too.
    """
    reads = [read for read in reads if read.size_bytes]
    read_s = sum(read.duration_s for read in reads) + sum(took_s for _, took_s in elsewhere)
    copy_s = max(0.0, total_s - read_s)
    all_bytes = sum(read.size_bytes for read in reads) + sum(size_bytes for size_bytes, _ in elsewhere)
    return [replace(r, duration_s=r.duration_s + copy_s * r.size_bytes / all_bytes) for r in reads]


class TransferStats(KVConnectorStats):
    """Sums, by counter and its label: {"loaded_bytes/dram": 40894464.0, "lost_chunks/missing": 1, ...}."""

    @classmethod
    def of(
        cls, transfers: Iterable[KVTransfer], rank: int, losses: Mapping[str, int] | None = None
    ) -> TransferStats:
        """Every rank moves its own bytes of the same tokens in the same seconds: only rank 0 counts these."""
        sums: Counter[str] = Counter({f"lost_chunks/{cause}": n for cause, n in (losses or {}).items()})
        for each in transfers:
            loads = each.direction == "load"
            amounts = {
                "loaded_tokens" if loads else "": each.tokens if rank == 0 else 0,
                "loaded_bytes" if loads else "stored_bytes": each.size_bytes,
                "load_seconds" if loads else "store_seconds": each.duration_s if rank == 0 else 0,
            }
            for name, amount in amounts.items():
                if name and amount:
                    sums[f"{name}/{each.tier.value}" if name in BY_TIER else name] += amount  # type: ignore[assignment]
        return cls(data=dict(sums))

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> TransferStats:
        sums = {key: self.data.get(key, 0) + other.data.get(key, 0) for key in self.data | other.data}
        return type(self)(data=sums)

    def reduce(self) -> dict[str, int | float]:
        return {key: round(amount, 6) for key, amount in sorted(self.data.items())}

    def is_empty(self) -> bool:
        return not self.data


class TransferMetrics(KVConnectorPromMetrics):
    """The same sums as Prometheus counters: continuum_loaded_bytes_total{tier="dram"}, ..."""

    def __init__(
        self, vllm_config: VllmConfig, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        forget_earlier_engine()
        self._counters: dict[str, Any] = {
            name: self._counter_cls(
                name=f"continuum_{name}",
                documentation=text,
                labelnames=[*labelnames, LABELS[name]] if name in LABELS else labelnames,
            )
            for name, text in COUNTERS.items()
        }
        for engine in per_engine_labelvalues:  # shown as 0 from the start, not absent
            self.observe(dict.fromkeys(all_keys(), 0), engine)

    def observe(self, transfer_stats_data: Mapping[str, float], engine_idx: int = 0) -> None:
        for key, amount in transfer_stats_data.items():
            name, _, label = key.partition("/")
            labels = [*self.per_engine_labelvalues[engine_idx], *([label] if label else [])]
            self._counters[name].labels(*labels).inc(amount)


def forget_earlier_engine() -> None:
    """Remove an earlier engine's counters from this process's registry, as vLLM does with its own."""
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "").removeprefix("continuum_") in COUNTERS:
            REGISTRY.unregister(collector)


def all_keys() -> list[str]:
    """Every key of TransferStats."""
    values = {"tier": [tier.value for tier in TIERS.values()], "cause": list(CAUSES)}
    return [
        f"{name}/{value}" if value else name
        for name in COUNTERS
        for value in (values[LABELS[name]] if name in LABELS else [""])
    ]
