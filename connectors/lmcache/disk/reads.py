"""Disk reads for LMCache that cannot deadlock or crash the engine, and that verify a checksum.

In stock LMCache 0.5.6 (`local_disk_backend.py`) a load waits for ever when its staging chunks do not
fit the DRAM pool (line 515: `allocate` in a busy loop, on the thread that would free the memory).
One missing file is a KeyError that kills the engine (line 773). A short file is read as if it were
complete (line 801 ignores the count). Nothing checks that the bytes are those that were written.
Here each of these chunks counts as missing: vLLM computes it again, with
`kv_load_failure_policy: recompute`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmcache.v1.cache_controller.message import OpType
from vllm.logger import init_logger

from connectors.lmcache.disk.lost_chunks import CAUSES, LostChunks, checksum
from connectors.lmcache.disk.writes import DiskWrites

logger = init_logger("vllm.continuum.lmcache_disk")
STAGING_WAITS = 50  # times; a write in flight holds its chunk for milliseconds
STAGING_WAIT_S = 0.005


class DiskReads:
    """Replaces one LocalDiskBackend's `batched_get_blocking`."""

    def __init__(self, disk: Any, writes: DiskWrites, losses: LostChunks) -> None:
        self._disk = disk
        self._sums = writes.sums
        self._losses = losses
        disk.batched_get_blocking = self.read

    def read(self, keys: Sequence[Any]) -> list[Any]:
        """The chunks of `keys`; None from the first one on that is missing or has no staging memory."""
        disk = self._disk
        with disk.disk_lock:
            metas = [disk.dict.get(key) for key in keys]
        staged = self._stage(keys, metas)
        staged_keys = keys[: len(staged)]
        chunks = list(disk._read_thread_pool.map(self._load, staged_keys, metas, staged))
        with disk.disk_lock:
            for key, chunk in zip(staged_keys, chunks, strict=True):
                if chunk is not None and key in disk.dict:
                    disk.cache_policy.update_on_hit(key, disk.dict)
        return chunks + [None] * (len(keys) - len(chunks))

    def _stage(self, keys: Sequence[Any], metas: Sequence[Any]) -> list[Any]:
        """DRAM for the leading chunks whose files are complete."""
        staged: list[Any] = []
        for key, meta in zip(keys, metas, strict=True):
            memory = self._allocate(meta) if meta is not None else None
            if memory is None:
                cause = "no_room" if meta is not None else "evicted"
                left = len(keys) - len(staged)
                self._losses.add(cause, left)
                logger.warning(
                    "LMCache: %d of %d chunks on disk cannot be loaded now and are computed again: %s",
                    left,
                    len(keys),
                    CAUSES[cause],
                )
                break
            if not is_whole(meta.path, len(memory.byte_array)):
                memory.ref_count_down()
                self._forget(key, "missing")
                break
            staged.append(memory)
        return staged

    def _load(self, key: Any, meta: Any, memory: Any) -> Any:
        """The chunk if its checksum is right; else None, and it is forgotten. Runs in a reader's thread."""
        written = self._sums.get(meta.path)
        chunk = self._disk._load_chunk_into_memory(key, meta.path, memory)
        if chunk is None:  # the failed read has freed its memory
            self._forget(key, "unreadable")
            return None
        if checksum(chunk.byte_array) != written:
            chunk.ref_count_down()
            self._forget(key, "corrupt")
            return None
        return chunk

    def _allocate(self, meta: Any) -> Any:
        """Memory in the DRAM pool, or None. Waits only while writes in flight may free some."""
        pool = self._disk.local_cpu_backend
        for _ in range(STAGING_WAITS):
            memory = pool.allocate(meta.shape, meta.dtype, meta.fmt, busy_loop=False)
            if memory is not None or not self._disk.disk_worker.put_tasks:
                return memory
            time.sleep(STAGING_WAIT_S)
        return None

    def _forget(self, key: Any, cause: str) -> None:
        """Remove a lost chunk from LMCache's index, which LMCache itself would not do."""
        disk = self._disk
        with disk.disk_lock:
            meta = disk.dict.pop(key, None)
            if meta is None:
                return
            disk.current_cache_size -= meta.size
            disk.cache_policy.update_on_force_evict(key)
        self._sums.pop(meta.path, None)
        self._losses.add(cause)
        with contextlib.suppress(OSError):
            Path(meta.path).unlink(missing_ok=True)
        disk.batched_msg_sender.add_kv_op(op_type=OpType.EVICT, key=key.chunk_hash)
        logger.warning("LMCache: %s: %s; its tokens are computed again", meta.path, CAUSES[cause])


def is_whole(path: str, size_bytes: int) -> bool:
    """Whether the file exists with its full length."""
    with contextlib.suppress(OSError):
        return Path(path).stat().st_size == size_bytes
    return False


def check_disk(disk: Any, chunk_bytes: int) -> None:
    """At start, log what makes the disk tier's measurements wrong, and change what would break it."""
    if disk.use_odirect and chunk_bytes % disk.os_disk_bs:
        logger.warning(
            "LMCache's disk tier falls back from O_DIRECT to the page cache: a chunk of %d bytes is not a "
            "multiple of the file system's %d; its speed is then that of memory",
            chunk_bytes,
            disk.os_disk_bs,
        )
    elif disk.use_odirect and not supports_odirect(Path(disk.path)):
        disk.use_odirect = False  # else every write fails, and keeps its DRAM chunk for ever
        logger.warning("LMCache's disk tier falls back to the page cache: %s refuses O_DIRECT", disk.path)
    stale = [entry.stat().st_size for entry in os.scandir(disk.path) if entry.name.endswith(".pt")]
    if stale:
        logger.warning(
            "LMCache's disk tier finds %d files (%.2f GiB) of an earlier run in %s; it never reads or "
            "deletes them: delete them yourself unless another server uses them",
            len(stale),
            sum(stale) / 1024**3,
            disk.path,
        )


def supports_odirect(directory: Path) -> bool:
    """Whether the file system supports O_DIRECT; tmpfs and some overlays do not."""
    probe = directory / f".odirect-{os.getpid()}"
    try:
        os.close(os.open(probe, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o644))
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True
