"""Disk writes for LMCache that survive a disk that refuses them; stock LMCache 0.5.6 does not.

In stock LMCache (`local_disk_backend.py`) a failed write keeps its chunk in the DRAM pool for ever, counts
its bytes against the disk for ever and stays "in flight" for ever (line 699, no code reads the future).
A short write under O_DIRECT counts as complete (line 786 ignores the count), and a later load
returns zeros or old content of the staging memory. An evicted file that is gone already kills
the engine (`os.remove`, line 290, on the engine's own thread). Here each of these chunks counts as
not on the disk.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from lmcache.v1.cache_controller.message import OpType
from vllm.logger import init_logger

from connectors.lmcache.disk.lost_chunks import LostChunks, checksum

logger = init_logger("vllm.continuum.lmcache_disk")


class DiskWrites:
    """Replaces one LocalDiskBackend's `write_file`, and wraps its save and remove."""

    def __init__(self, disk: Any, losses: LostChunks) -> None:
        self._disk = disk
        self._losses = losses
        self.sums: dict[str, int] = {}  # of every complete file, by path
        self._is_refusing = False
        self._save, disk.async_save_bytes_to_disk = disk.async_save_bytes_to_disk, self.save
        self._remove, disk.remove = disk.remove, self.remove
        disk.write_file = self.write

    def write(self, buffer: Any, path: str) -> None:
        """All of `buffer` into `path`, or an OSError."""
        disk = self._disk
        is_direct = disk.use_odirect and not len(buffer) % disk.os_disk_bs
        flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC | (os.O_DIRECT if is_direct else 0)
        left = memoryview(buffer).cast("B")
        handle = os.open(path, flags, 0o644)
        try:
            while left:
                left = left[os.write(handle, left) :]
        finally:
            os.close(handle)
        self.sums[path] = checksum(buffer)

    def save(self, key: Any, memory_obj: Any, on_complete_callback: Any = None) -> None:
        """LMCache's own, from a thread of its pool. If the disk refuses it, the chunk is not kept."""
        try:
            self._save(key, memory_obj, on_complete_callback)
        except (OSError, ValueError) as error:  # ValueError: a path with a NUL, from a tag in the key
            self._undo(key, memory_obj)
            self._refused(error)
        else:
            self._is_refusing = False

    def remove(self, key: Any, force: bool = True) -> bool:
        """LMCache's own. `force`: not an eviction, and the caller does not hold the disk's lock."""
        disk = self._disk
        meta = disk.dict.get(key)
        try:
            removed: bool = self._remove(key, force)
        except OSError as error:  # not in LMCache's index any more; the file is gone or cannot be deleted
            logger.warning("LMCache: %s was not deleted: %s", meta.path, error)
            disk.batched_msg_sender.add_kv_op(op_type=OpType.EVICT, key=key.chunk_hash)
            removed = True
        if removed:
            self.sums.pop(meta.path, None)
            if force:  # LMCache frees the disk's bytes only where it evicts
                with disk.disk_lock:
                    disk.current_cache_size -= meta.size
        return removed

    def _undo(self, key: Any, memory_obj: Any) -> None:
        """Restore the state before the chunk was submitted."""
        disk, path = self._disk, str(self._disk._key_to_path(key))
        self.sums.pop(path, None)
        with contextlib.suppress(OSError, ValueError):
            Path(path).unlink(missing_ok=True)
        with disk.disk_lock:
            disk.current_cache_size -= memory_obj.get_physical_size()
            disk.usage -= len(memory_obj.byte_array)
            disk.cache_policy.update_on_force_evict(key)
        memory_obj.ref_count_down()
        disk.disk_worker.remove_put_task(key)

    def _refused(self, error: OSError | ValueError) -> None:
        self._losses.add("unwritten")
        if not self._is_refusing:
            self._is_refusing = True
            logger.warning(
                "LMCache's disk tier cannot write to %s: %s; chunks stay in DRAM alone until it can "
                "(logged once, counted in continuum_lost_chunks_total)",
                self._disk.path,
                error,
            )
