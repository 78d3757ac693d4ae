"""In the LMCache MP server: a checksum behind each chunk that lies in a file of L2, compared at each load.

    store    L1's bytes ---> LMCache's file, written, then renamed ---> our trailer, appended to the file
    load     LMCache's file ---> L1's bytes; their checksum is the trailer's, or the chunk is not loaded

LMCache 0.5.6 believes a file of the right length. The checksum is that of the file's name and the bytes, so
another chunk's file does not pass either. It lies in the file itself and is written once: a kill, at whatever
moment, leaves a file without a trailer, which nobody believes, nor one that stock LMCache wrote. LMCache
writes no file that exists, so what is not believed is deleted.

Used members: the methods of L2AdapterInterface, wrapped on the instance, its `_max_capacity_bytes` and
`_notify_keys_stored`; NativeConnectorL2Adapter's `_key_sizes`; MemoryObj.byte_array; _object_key_to_filename.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from awscrt.checksums import crc64nvme
from lmcache.logging import init_logger
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import _object_key_to_filename

logger = init_logger("lmcache.continuum")
MAGIC = b"kvcrc64\n"
TRAILER_BYTES = len(MAGIC) + 8
Keys = list[ObjectKey]


class WatchedL2:
    """One L2 adapter: its chunks are checked, its failed stores counted, its size what the disk has room for.

    LMCache calls stores from one thread and loads from another.
    """

    def __init__(self, adapter: Any, folder: Path | None, checks: bool) -> None:
        """`folder`: of an adapter with a file for each piece; of another one only failed stores are known."""
        self._adapter = getattr(adapter, "inner_adapter", adapter)  # inside of what packs the bytes
        self._folder, self.checks = folder, checks and folder is not None
        self._configured_bytes: int = self._adapter.get_usage().total_capacity_bytes
        self.damaged_chunks = self.failed_stores = 0
        self._stores: dict[int, tuple[Keys, list[bytes]]] = {}  # under way: the keys and their trailers
        self._loads: dict[int, tuple[Keys, list[Any]]] = {}
        self._deletions: dict[ObjectKey, threading.Thread] = {}  # under way, of damaged chunks
        inner = self._adapter
        self._store, inner.submit_store_task = inner.submit_store_task, self.store
        self._stored, inner.pop_completed_store_tasks = inner.pop_completed_store_tasks, self.stored
        if self.checks:
            self._load, inner.submit_load_task = inner.submit_load_task, self.load
            self._loaded, inner.query_load_result = inner.query_load_result, self.loaded
        elif folder is not None:
            logger.warning("what is read from %s is not checked: checksums are off", folder)

    def adopt(self, files: Mapping[ObjectKey, Path]) -> Keys:
        """Count what an earlier server left, oldest first, which LMCache itself neither counts nor evicts;
        returns the chunks that may be loaded."""
        if self._configured_bytes:
            sizes = {key: file.stat().st_size for key, file in files.items()}
            self._adapter._key_sizes.update(sizes)
            self._adapter._notify_keys_stored(list(sizes), list(sizes.values()))
        believed = [key for key, file in files.items() if not self.checks or has_trailer(file)]
        if len(believed) < len(files):
            text = "%d of %d files in %s have no checksum of this package's: they are not used"
            logger.warning(text, len(files) - len(believed), len(files), self._folder)
        return believed

    def fit(self) -> None:
        """Let LMCache evict before the disk is full, where that has less room than was configured."""
        if self._folder is not None and self._configured_bytes:
            room_bytes = self._adapter.get_usage().total_bytes_used + free_bytes(self._folder)
            self._adapter._max_capacity_bytes = max(1, min(self._configured_bytes, room_bytes))

    def store(self, keys: Keys, objects: list[Any]) -> int:
        """submit_store_task. LMCache would keep a file that is there, also one without a checksum; and it
        reports what it stored before what it deleted, in whatever order it did both."""
        deletions = self._deletions
        for deletion in {deletions[key] for key in keys if key in deletions}:
            deletion.join()
        trailers = []
        if self.checks:
            for path in map(self._path, keys):
                if not has_trailer(path):
                    path.unlink(missing_ok=True)
            trailers = [trailer(key, obj.byte_array) for key, obj in zip(keys, objects, strict=True)]
        task: int = self._store(keys, objects)
        self._stores[task] = keys, trailers
        return task

    def stored(self) -> dict[int, L2StoreResult]:
        """pop_completed_store_tasks, with the trailers written; L1 still holds the chunks."""
        results: dict[int, L2StoreResult] = self._stored()
        for task, result in results.items():
            keys, trailers = self._stores.pop(task)
            try:
                for key, text in zip(keys, trailers, strict=False):  # without checks there are none
                    append_once(self._path(key), text)
                reason = "" if result.is_successful() else "LMCache's adapter failed"
            except OSError as error:
                reason = str(error)
            if reason:
                self._give_up(keys, reason)
                results[task] = L2StoreResult(False, 0)
            self.fit()
        return results

    def _give_up(self, keys: Keys, reason: str) -> None:
        self.failed_stores += len(keys)
        if self._folder is None:
            logger.warning("%d chunks were not stored in L2: %s", len(keys), reason)
            return
        text = "%d chunks were not stored in %s, which has %d bytes free: %s"
        logger.warning(text, len(keys), self._folder, free_bytes(self._folder), reason)
        self._adapter.delete(keys)  # what was written of them

    def load(self, keys: Keys, objects: list[Any]) -> int:
        task: int = self._load(keys, objects)
        self._loads[task] = keys, objects
        return task

    def loaded(self, task: int) -> Any:
        """query_load_result, without the chunks that are not what was stored."""
        found = self._loaded(task)
        if found is None:
            return None
        keys, objects = self._loads.pop(task)
        lost = []
        for index, (key, obj) in enumerate(zip(keys, objects, strict=True)):
            path = self._path(key)
            if not (found.test(index) and last_bytes(path) == trailer(key, obj.byte_array)):
                found.clear(index)
                lost += [key] if path.exists() else []
        if lost:
            self.damaged_chunks += len(lost)
            for path in map(self._path, lost):
                logger.warning("%s is damaged, or has no checksum: it is not used, and deleted", path)
            # it waits for writes in the adapter's queue, and this thread serves lookups
            deletion = threading.Thread(target=self._adapter.delete, args=(lost,), daemon=True)
            deletion.start()
            alive = {key: thread for key, thread in self._deletions.items() if thread.is_alive()}
            self._deletions = alive | dict.fromkeys(lost, deletion)  # a new table: the other thread reads it
        return found

    def _path(self, key: ObjectKey) -> Path:
        assert self._folder is not None
        return Path(self._folder, _object_key_to_filename(key))


def free_bytes(folder: Path) -> int:
    """The free space of a folder's file system; of a folder that is gone none."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def trailer(key: ObjectKey, content: memoryview) -> bytes:
    """What stands behind a chunk's bytes in its file."""
    name = crc64nvme(_object_key_to_filename(key).encode())
    checksum: int = crc64nvme(content, name)
    return MAGIC + checksum.to_bytes(8, "little")


def last_bytes(path: Path) -> bytes:
    """A file's trailer, if it has one; of a file that is gone or cannot be read nothing."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TRAILER_BYTES))
            return file.read()
    except OSError:
        return b""


def has_trailer(path: Path) -> bool:
    """Whether a file's chunk was stored whole."""
    return last_bytes(path).startswith(MAGIC)


def append_once(path: Path, text: bytes) -> None:
    """Complete a new file; one that was there before has its trailer, and one may be evicted already."""
    if path.exists() and not has_trailer(path):
        with path.open("r+b") as file:
            file.seek(0, os.SEEK_END)
            file.write(text)
