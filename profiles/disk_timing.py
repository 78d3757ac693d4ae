"""Disk to host and back, as LMCache's disk tier does it: a file per chunk, several threads, O_DIRECT.

Where the file system refuses O_DIRECT, files are synced and dropped from the page cache first. Either
way the kernel's own count of bytes fetched (/proc/self/io) says whether the disk or the page cache
answered. The hardware behind a virtual disk is not visible.
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

from profiles.timing import Budget, Sample, Timer, in_turns

THREADS = 4  # LMCache's disk_io_threads
ALIGNMENT_BYTES = 4096
FILES = 96  # written once and read in random order
IO_COUNTS = Path("/proc/self/io")


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


class Files:
    """Chunk files in one folder on the disk to be measured."""

    def __init__(self, folder: Path, chunk_bytes: int, count: int) -> None:
        self.folder, self.chunk_bytes, self.count = folder, chunk_bytes, count
        self.direct = chunk_bytes % ALIGNMENT_BYTES == 0 and supports_odirect(folder)
        self._pool = ThreadPoolExecutor(THREADS)
        self._buffers = [mmap.mmap(-1, chunk_bytes) for _ in range(count)]  # aligned to a page
        for at, buffer in enumerate(self._buffers):
            buffer.write(random.Random(at).randbytes(chunk_bytes))

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
    files: Files, chunk_counts: list[int], budget: Budget, timer: Timer, tick: Callable[[], None]
) -> dict[tuple[str, int], list[Sample]]:
    """Seconds of loads and stores of this many chunks at once."""
    draw = random.Random(0)
    files.write(list(range(files.count)))
    points = [(way, n) for n in chunk_counts if n <= files.count for way in ("load", "store")]

    def run(point: tuple[str, int]) -> Sample:
        chosen = draw.sample(range(files.count), point[1])
        files.drop(chosen)
        move = files.read if point[0] == "load" else files.write
        return timer.time(lambda: move(chosen))

    return in_turns(points, run, budget, tick)


def answered_by(files: Files, chunks: int) -> str:
    """What answers a read of this many files: "disk", "page cache", or "unknown" without /proc/self/io."""
    which = list(range(min(chunks, files.count)))
    files.drop(which)
    before = fetched_bytes()
    files.read(which)
    after = fetched_bytes()
    if before is None or after is None:
        return "unknown"
    return "disk" if after - before >= len(which) * files.chunk_bytes / 2 else "page cache"


def fetched_bytes() -> int | None:
    """What this process had the storage layer fetch so far; None where the kernel does not say."""
    with contextlib.suppress(OSError):
        counts = dict(line.split(": ") for line in IO_COUNTS.read_text().splitlines())
        return int(counts["read_bytes"])
    return None


def file_system(folder: Path) -> str:
    """The type of the file system that holds the folder, as the kernel names it."""
    with contextlib.suppress(OSError):
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
        at = str(folder.resolve())
        over = [(len(point), kind) for point, kind in mounts if Path(at).is_relative_to(point)]
        return max(over)[1] if over else "unknown"
    return "unknown"


@contextlib.contextmanager
def chunk_files(disk_dir: Path, chunk_bytes: int, count: int = FILES) -> Iterator[Files]:
    """Files in a folder of their own, removed afterwards."""
    with TemporaryDirectory(prefix="measure-", dir=disk_dir) as folder:
        files = Files(Path(folder), chunk_bytes, count)
        try:
            yield files
        finally:
            files.close()
