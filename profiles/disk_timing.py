"""Disk to host and back, as LMCache's disk tier does it: a file per chunk, several threads, O_DIRECT.

Where the file system refuses O_DIRECT, files are synced and dropped from the page cache first, as far as the
kernel listens. The hardware behind a virtual disk is not visible.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from profiles.timing import Budget, time_moves, timed

THREADS = 4  # LMCache's disk_io_threads
ALIGNMENT_BYTES = 4096
FILES = 96  # written once and read in random order


class Files:
    """Chunk files in one folder on the disk to be measured."""

    def __init__(self, folder: Path, chunk_bytes: int, count: int) -> None:
        self.folder, self.chunk_bytes, self.count = folder, chunk_bytes, count
        self.direct = chunk_bytes % ALIGNMENT_BYTES == 0
        self._pool = ThreadPoolExecutor(THREADS)
        self._buffers = [mmap.mmap(-1, chunk_bytes) for _ in range(count)]  # aligned to a page
        for at, buffer in enumerate(self._buffers):
            buffer.write(random.Random(at).randbytes(chunk_bytes))
        try:
            self._write(0)
        except OSError:
            self.direct = False  # tmpfs and some overlays refuse it

    def write(self, which: list[int]) -> None:
        list(self._pool.map(self._write, which))

    def read(self, which: list[int]) -> None:
        list(self._pool.map(self._read, which))

    def drop(self, which: list[int]) -> None:
        """Out of the page cache, as far as the kernel listens."""
        for at in which:
            with self._opened(at, os.O_RDONLY, direct=False) as fd:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        self._pool.shutdown()

    def _write(self, at: int) -> None:
        with self._opened(at, os.O_CREAT | os.O_WRONLY, self.direct) as fd:
            if os.write(fd, self._buffers[at]) != self.chunk_bytes:
                raise OSError(f"the disk took less than a chunk of {self.chunk_bytes} bytes")
            if not self.direct:
                os.fsync(fd)

    def _read(self, at: int) -> None:
        with self._opened(at, os.O_RDONLY, self.direct) as fd:
            if os.preadv(fd, [self._buffers[at]], 0) != self.chunk_bytes:
                raise OSError(f"the disk gave less than a chunk of {self.chunk_bytes} bytes")

    @contextlib.contextmanager
    def _opened(self, at: int, flags: int, direct: bool) -> Iterator[int]:
        fd = os.open(self.folder / f"{at}.chunk", flags | (os.O_DIRECT if direct else 0), 0o600)
        try:
            yield fd
        finally:
            os.close(fd)


def time_disk(
    files: Files, chunk_counts: list[int], budget: Budget, tick: Callable[[], None]
) -> dict[tuple[str, int], list[float]]:
    """Seconds of reads and writes of this many chunks at once."""
    files.write(list(range(files.count)))

    def move(way: str, chosen: list[int]) -> float:
        files.drop(chosen)
        return timed(lambda: (files.read if way == "load" else files.write)(chosen))

    return time_moves(chunk_counts, files.count, move, budget, tick)


@contextlib.contextmanager
def chunk_files(disk_dir: Path, chunk_bytes: int, count: int = FILES) -> Iterator[Files]:
    """Files in a folder of their own, removed afterwards."""
    with TemporaryDirectory(prefix="measure-", dir=disk_dir) as folder:
        files = Files(Path(folder), chunk_bytes, count)
        try:
            yield files
        finally:
            files.close()
