"""Chunks on their way from LMCache's disk tier to its DRAM, before anybody asks for them.

LMCache 0.5.6 in-process has no such call. Here a thread of our own reads one chunk after the other and
puts it into the DRAM tier, as LMCache does with what a load read from the disk; a load never waits for
more than one chunk of it (lmcache_disk.DiskReads.lock).
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from connectors.lmcache_disk import DiskReads


class Raiser:
    """One LMCache engine's prompts to be raised, first come, first served."""

    def __init__(self, disk: Any, cpu: Any, reads: DiskReads) -> None:
        self._disk, self._cpu, self._reads = disk, cpu, reads
        self._thread = ThreadPoolExecutor(1, "continuum-prefetch")
        self._closed = False
        self._under_way: set[Future[None]] = set()

    @property
    def is_busy(self) -> bool:
        """Whether anything is still to be read."""
        return any(not future.done() for future in self._under_way)

    def add(self, chunks: Collection[int]) -> None:
        """Raise these chunks, the prompt's head first, as far as the disk has them and DRAM has room."""
        self._under_way = {future for future in self._under_way if not future.done()}
        future = self._thread.submit(self._raise, list(chunks))
        future.add_done_callback(lambda done: done.cancelled() or done.result())  # an error is logged there
        self._under_way.add(future)

    def close(self) -> None:
        self._closed = True
        self._thread.shutdown(cancel_futures=True)

    def _raise(self, chunks: list[int]) -> None:
        with self._disk.disk_lock:
            keys = {key.chunk_hash: key for key in self._disk.dict}
        wanted = [keys[chunk] for chunk in chunks if chunk in keys]
        for key in wanted:
            if self._closed or not (key in self._cpu.hot_cache or self._bring(key)):
                return
        with self._cpu.cpu_lock:  # the head is to be evicted last: without it nothing is found
            for key in reversed(wanted):
                if key in self._cpu.hot_cache:
                    self._cpu.cache_policy.update_on_hit(key, self._cpu.hot_cache)

    def _bring(self, key: Any) -> bool:
        """Read one chunk into DRAM. Whether it is there."""
        chunk = self._reads.one(key)
        if chunk is None:
            return False
        self._cpu.submit_put_task(key, chunk)
        chunk.ref_count_down()
        return True
