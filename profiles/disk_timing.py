"""Disk to host and back, as LMCache's disk tier does it: a file per chunk, several threads, O_DIRECT.

Where the file system refuses O_DIRECT, files are synced and dropped from the page cache first, as far as the
kernel listens. The hardware behind a virtual disk is not visible.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from tempfile import TemporaryDirectory

from profiles.timing import timed

THREADS = 4  # LMCache's disk_io_threads
ALIGNMENT_BYTES = 4096
FILES = 96  # written once and read in random order


class Files:
    """Chunk files in one folder on the disk to be measured."""

    def __init__(self, folder: Path, chunk_bytes: int, count: int, pool: ThreadPoolExecutor) -> None:
        self.folder, self.chunk_bytes, self.count, self._pool = folder, chunk_bytes, count, pool
        self.direct = chunk_bytes % ALIGNMENT_BYTES == 0
        self._buffers = [mmap.mmap(-1, chunk_bytes) for _ in range(count)]  # aligned to a page
        for at, buffer in enumerate(self._buffers):
            buffer.write(random.Random(at).randbytes(chunk_bytes))
        try:
            self._write(0)
        except OSError:
            self.direct = False  # tmpfs and some overlays refuse it
        list(pool.map(self._write, range(count)))

    def move(self, way: str, which: list[int]) -> float:
        """Seconds of a "load" or a "store" of these chunks, which the page cache forgets before, as far as
        the kernel listens."""
        for at in which:
            with self._opened(at, os.O_RDONLY, direct=False) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        work = self._read if way == "load" else self._write
        return timed(lambda: list(self._pool.map(work, which)))[0]

    def _write(self, at: int) -> None:
        with self._opened(at, os.O_CREAT | os.O_WRONLY, self.direct) as file:
            if file.write(self._buffers[at]) != self.chunk_bytes:
                raise OSError(f"the disk took less than a chunk of {self.chunk_bytes} bytes")
            if not self.direct:
                os.fsync(file.fileno())

    def _read(self, at: int) -> None:
        with self._opened(at, os.O_RDONLY, self.direct) as file:
            if file.readinto(self._buffers[at]) != self.chunk_bytes:
                raise OSError(f"the disk gave less than a chunk of {self.chunk_bytes} bytes")

    def _opened(self, at: int, flags: int, direct: bool) -> FileIO:
        fd = os.open(self.folder / f"{at}.chunk", flags | (os.O_DIRECT if direct else 0), 0o600)
        return os.fdopen(fd, "r+b", buffering=0)


@contextlib.contextmanager
def chunk_files(disk_dir: Path, chunk_bytes: int, count: int = FILES) -> Iterator[Files]:
    """Files in a folder of their own, removed afterwards."""
    with TemporaryDirectory(prefix="measure-", dir=disk_dir) as folder, ThreadPoolExecutor(THREADS) as pool:
        yield Files(Path(folder), chunk_bytes, count, pool)
