"""LMCache's disk tier when files are lost or DRAM is short: less is loaded, nothing hangs or dies."""

from __future__ import annotations

import pytest

pytest.importorskip("lmcache")

from lmcache_rig import CHUNK, prompt

from connectors.lmcache.disk.reads import is_whole, supports_odirect
from continuum_lmcache.reload.tier_store import TierHit


@pytest.mark.parametrize("lost", [[0], [2], [1, 3]])
def test_lost_chunk_files_end_the_load_before_them(rig, lost):
    r = rig()
    tokens = prompt(1, 5)
    r.store(tokens)
    r.evict_from_dram()
    for chunk in lost:
        r.file_of(tokens, chunk).unlink()
    assert r.load(tokens) == lost[0] * CHUNK
    r.step()
    assert r.tiers.locate(tokens) == TierHit(0, lost[0] * CHUNK)


def test_the_only_chunk_lost_is_no_load_and_no_crash(rig):
    r = rig()
    tokens = prompt(1, 1)
    r.store(tokens)
    r.evict_from_dram()
    r.file_of(tokens, 0).unlink()
    assert r.load(tokens) == 0
    r.store(tokens)
    r.settle()
    assert r.load(tokens) == CHUNK


def test_a_file_cut_short_is_lost_not_loaded(rig):
    r = rig()
    tokens = prompt(1, 3)
    r.store(tokens)
    r.evict_from_dram()
    path = r.file_of(tokens, 1)
    path.write_bytes(path.read_bytes()[:-1])
    assert r.load(tokens) == CHUNK
    assert not path.exists()


def test_a_lost_file_gives_its_room_on_disk_back(rig):
    r = rig()
    r.store(prompt(1, 5))
    r.evict_from_dram()
    before_bytes = r.disk.current_cache_size
    r.file_of(prompt(1, 5), 0).unlink()
    r.load(prompt(1, 5))
    assert before_bytes - r.disk.current_cache_size == before_bytes / 5


def test_a_disk_load_larger_than_the_dram_pool_brings_what_fits(rig):
    r = rig(dram_chunks=4, disk_chunks=40)
    tokens = prompt(1, 9)
    for chunk in range(9):  # as a prompt grows over turns: DRAM never holds all of it
        r.store(prompt(1, chunk + 1), skip_chunks=chunk)
        r.evict_from_dram()
    assert r.tiers.locate(tokens) == TierHit(0, 9 * CHUNK)
    assert 0 < r.load(tokens) <= 4 * CHUNK


def test_a_disk_load_does_not_wait_for_pins_that_only_this_thread_could_release(rig):
    r = rig(dram_chunks=6, disk_chunks=40)
    r.store(prompt(1, 4))
    r.evict_from_dram()
    r.store(prompt(2, 5))
    r.settle()
    r.engine.lookup(prompt(2, 5), lookup_id="another request of this step", pin=True)
    assert r.load(prompt(1, 4)) == CHUNK
    r.engine.lookup_unpin("another request of this step")
    assert r.load(prompt(1, 4)) == 4 * CHUNK


def test_a_whole_file_is_there_in_full_length(tmp_path):
    path = tmp_path / "chunk.pt"
    assert not is_whole(str(path), 3)
    path.write_bytes(b"abc")
    assert is_whole(str(path), 3) and not is_whole(str(path), 4)


def test_asking_for_o_direct_leaves_no_file_behind(tmp_path):
    assert supports_odirect(tmp_path) in (True, False)
    assert list(tmp_path.iterdir()) == []
