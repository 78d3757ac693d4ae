"""LMCache's disk tier on a disk that refuses, loses or changes data; and stock LMCache there."""

from __future__ import annotations

import mmap
import os
import resource
import shutil
import subprocess
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("lmcache")

from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend
from lmcache_rig import CHUNK, prompt, rigs

from connectors.lmcache.disk.lost_chunks import LostChunks, checksum
from connectors.lmcache.disk.reads import is_whole, supports_odirect
from connectors.lmcache.disk.writes import DiskWrites
from continuum_lmcache.reload.tier_store import TierHit


def full(path: Path) -> None:
    """Every write here fails with "no space left on device"."""
    path.symlink_to("/dev/full")


def not_a_file(path: Path) -> None:
    path.mkdir()


def no_folder(path: Path) -> None:
    shutil.rmtree(path.parent)


def lost(r) -> dict[str, int]:
    """Chunks lost since the last call, by cause."""
    found, r.lost = r.lost + r.worker._losses.take(), Counter()
    return dict(found)


@pytest.mark.parametrize("refuse", [full, not_a_file, no_folder])
def test_a_chunk_that_the_disk_refuses_stays_in_dram_and_leaves_no_trace_in_the_books(rig, refuse):
    r = rig(dram_chunks=4)
    r.store(prompt(0, 1))  # a file the disk takes
    r.settle()
    refuse(r.file_of(prompt(1, 1), 0))
    before = r.disk.current_cache_size, r.disk.usage
    for _ in range(3 * 4):  # a chunk left in the pool each time would soon fill it
        r.store(prompt(1, 1))
        r.settle()
        assert r.load(prompt(1, 1)) == CHUNK
        assert r.tiers.locate(prompt(1, 1)) == TierHit(CHUNK, 0)
        assert (r.disk.current_cache_size, r.disk.usage) == before
        assert not r.disk.disk_worker.put_tasks
        r.cpu.clear()
        if refuse is full and not r.file_of(prompt(1, 1), 0).is_symlink():
            full(r.file_of(prompt(1, 1), 0))
    assert lost(r) == {"unwritten": 12}


def test_a_chunk_whose_name_no_file_can_have_stays_in_dram_and_leaves_no_trace_in_the_books(rig):
    r = rig(dram_chunks=4)
    r.store(prompt(0, 1))
    r.settle()
    before = r.disk.current_cache_size, r.disk.usage
    for tag in range(3 * 4):  # a client's tag is part of the key, and the key is part of the path
        r.store(prompt(1, 1), request_configs={"lmcache.tag.user": f"a\0{tag}"})
        r.settle()
        assert (r.disk.current_cache_size, r.disk.usage) == before
        assert not r.disk.disk_worker.put_tasks
    assert lost(r) == {"unwritten": 12}


def test_a_disk_that_takes_files_again_is_used_again(rig):
    r = rig()
    shutil.rmtree(r.disk.path)
    r.store(prompt(1, 3))
    r.evict_from_dram()
    assert r.load(prompt(1, 3)) == 0
    Path(r.disk.path).mkdir()
    r.store(prompt(1, 3))
    r.evict_from_dram()
    assert r.load(prompt(1, 3)) == 3 * CHUNK


def test_on_a_real_full_file_system_what_fits_is_kept_and_the_rest_stays_in_dram(tmp_path):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system here: {mounted.stderr.decode().strip()}")
    try:
        with rigs(tmp_path) as make:
            r = make()
            r.store(prompt(1, 5))  # a page a file, and a page for the folder is free of charge
            r.settle()
            assert lost(r) == {"unwritten": 3}
            assert r.load(prompt(1, 5)) == 5 * CHUNK
            subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
            r.store(prompt(2, 3))
            r.settle()
            assert lost(r) == {"unwritten": 3}
            assert r.load(prompt(2, 3)) == 3 * CHUNK
            r.cpu.clear()
            r.step()
            assert r.load(prompt(1, 5)) == r.load(prompt(2, 3)) + 2 * CHUNK == 2 * CHUNK
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_evicting_a_file_that_is_gone_already_is_an_eviction(rig):
    r = rig(disk_chunks=4)
    r.store(prompt(1, 4))
    r.settle()
    r.lose_files()
    r.store(prompt(2, 4))
    r.evict_from_dram()
    assert r.tiers.locate(prompt(1, 4)) == TierHit(0, 0)
    assert r.load(prompt(2, 4)) == 4 * CHUNK


def test_what_is_cleared_from_the_disk_gives_its_room_back(rig):
    r = rig()
    r.store(prompt(1, 4))
    r.settle()
    r.engine.clear(prompt(1, 4))
    assert r.disk.current_cache_size == 0
    assert not r.worker.snapshot().ssd


def flip(path: Path, _other: Path) -> None:
    changed = bytearray(path.read_bytes())
    changed[len(changed) // 3] ^= 1
    path.write_bytes(changed)


def swap(path: Path, other: Path) -> None:
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize("change", [flip, swap])
def test_a_chunk_whose_bytes_have_changed_is_lost_not_loaded(rig, change):
    r = rig()
    r.store(prompt(1, 4))
    r.store(prompt(2, 4))
    r.evict_from_dram()
    change(r.file_of(prompt(1, 4), 2), r.file_of(prompt(2, 4), 2))
    assert r.load(prompt(1, 4)) == 2 * CHUNK
    assert lost(r) == {"corrupt": 1}
    r.step()
    assert r.tiers.locate(prompt(1, 4)) == TierHit(0, 2 * CHUNK)
    assert r.load(prompt(2, 4)) == 4 * CHUNK


def test_a_file_that_cannot_be_read_is_lost_once_and_not_tried_for_ever(rig):
    r = rig()
    r.store(prompt(1, 2))
    r.evict_from_dram()
    path = r.file_of(prompt(1, 2), 1)
    path.unlink()
    path.symlink_to("/proc/self/mem")  # whole by its length, and an error to read
    r.disk.dict[r.keys(prompt(1, 2))[1]].size = 0
    assert r.load(prompt(1, 2)) == CHUNK
    assert r.keys(prompt(1, 2))[1] not in r.disk.dict


@given(st.binary(min_size=1, max_size=3 * 4096), st.data())
def test_a_checksum_detects_every_flipped_bit(content, data):
    at = data.draw(st.integers(0, len(content) * 8 - 1))
    changed = bytearray(content)
    changed[at // 8] ^= 1 << at % 8
    assert checksum(content) == checksum(bytearray(content)) != checksum(changed)


def test_a_checksum_detects_sectors_that_changed_places():
    first, second = bytes(range(256)) * 16, bytes(4096)
    assert checksum(first + second) != checksum(second + first)


# LMCache without our checks --------------------------------------------------------------------------


def on_a_disk_with_4096_bytes_left(write) -> BaseException | None:
    """The result of a call that writes more, in a process whose files cannot grow further."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            write()
            os.write(writer, b"done")
        except OSError as error:
            os.write(writer, error.strerror.encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    return os.read(reader, 100).decode()


def a_disk(**others) -> SimpleNamespace:
    """As much of a LocalDiskBackend as writing and reading a file needs."""
    return SimpleNamespace(os_disk_bs=4096, dict={}, disk_lock=threading.Lock(), **others)


def test_stock_lmcache_takes_a_write_cut_short_by_a_full_disk_for_whole_and_ours_does_not(tmp_path):
    if not supports_odirect(tmp_path):
        pytest.skip("the file system refuses O_DIRECT")
    mine, path = aligned(b"A" * 8192), str(tmp_path / "chunk.pt")
    stock = a_disk(use_odirect=True)
    assert on_a_disk_with_4096_bytes_left(lambda: LocalDiskBackend.write_file(stock, mine, path)) == "done"
    assert Path(path).stat().st_size == 4096
    ours = DiskWrites(a_disk(use_odirect=True, async_save_bytes_to_disk=None, remove=None), LostChunks())
    assert on_a_disk_with_4096_bytes_left(lambda: ours.write(mine, path)) == "File too large"
    ours.write(mine, path)
    assert Path(path).read_bytes() == bytes(mine)


def test_stock_lmcache_reads_a_short_file_as_if_it_were_whole_and_hands_over_another_requests_bytes(tmp_path):
    """Silently wrong data, in small. Under O_DIRECT ext4 returns zeros, which is as wrong."""
    path = tmp_path / "chunk.pt"
    path.write_bytes(b"A" * 4096)
    staging = bytearray(b"B" * 8192)  # another request's KV was staged here before
    LocalDiskBackend.read_file(a_disk(use_odirect=False), "key", staging, str(path))
    assert bytes(staging) == b"A" * 4096 + b"B" * 4096
    assert not is_whole(str(path), len(staging))


def aligned(content: bytes) -> memoryview:
    """The bytes at an address that O_DIRECT takes."""
    page = mmap.mmap(-1, len(content))
    page.write(content)
    return memoryview(page)
