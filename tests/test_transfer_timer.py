"""The times of loads and stores, by tier."""

from __future__ import annotations

import pytest

pytest.importorskip("lmcache")

from lmcache_rig import CHUNK, prompt

from connectors.lmcache.transfer_timer import TransferStats, with_copy
from continuum_lmcache.reload.tier_store import KVTransfer
from continuum_lmcache.types import Tier


def test_a_loads_copy_is_shared_out_by_bytes():
    reads = [KVTransfer(Tier.DRAM, "load", 16, 300, 0.1), KVTransfer(Tier.SSD, "load", 48, 900, 0.5)]
    loads = with_copy(reads, total_s=1.0)
    assert [load.duration_s for load in loads] == pytest.approx([0.2, 0.8])
    assert with_copy([KVTransfer(Tier.SSD, "load", 0, 0, 0.5)], 1.0) == []


def test_what_a_load_read_from_a_remote_backend_is_no_tiers_time():
    reads = [KVTransfer(Tier.DRAM, "load", 16, 300, 0.1)]
    (load,) = with_copy(reads, total_s=1.0, elsewhere=[(900, 0.5)])
    assert (load.size_bytes, load.duration_s) == (300, pytest.approx(0.1 + 0.4 / 4))


def test_every_load_and_store_is_timed_by_tier(rig):
    r = rig()
    r.store(prompt(1, 4))
    r.evict_from_dram()
    r.load(prompt(1, 4))
    r.step()
    store, load = r.tiers.transfers()
    assert (store.tier, store.direction, store.tokens) == (Tier.DRAM, "store", 4 * CHUNK)
    assert (load.tier, load.direction, load.tokens) == (Tier.SSD, "load", 4 * CHUNK)
    assert store.size_bytes == load.size_bytes == 4 * CHUNK * r.bytes_per_token
    assert min(store.duration_s, load.duration_s) > 0
    assert r.tiers.transfers() == []


def test_the_metrics_add_up_over_ranks_and_steps():
    loads = [KVTransfer(Tier.SSD, "load", 256, 1000, 0.5), KVTransfer(Tier.DRAM, "store", 256, 1000, 0.25)]
    both = TransferStats.of(loads, rank=0).aggregate(TransferStats.of(loads, rank=1))
    assert both.data == {
        "loaded_tokens/ssd": 256,
        "loaded_bytes/ssd": 2000,
        "load_seconds/ssd": 0.5,
        "stored_bytes": 2000,
        "store_seconds": 0.25,
    }
    assert TransferStats().is_empty()


def test_a_failed_load_leaves_nothing_for_the_next_ones_time(rig):
    r = rig()
    tokens = prompt(1, 2)
    r.store(tokens)
    r.evict_from_dram()
    r.lose_files()
    r.worker._timer.take()
    assert r.load(tokens) == 0
    assert r.worker._timer.take() == []


def test_a_loads_time_is_from_its_first_look_to_the_end_of_its_copy(rig):
    r = rig()
    r.store(prompt(1, 2))
    r.evict_from_dram()
    r.worker._timer.take()
    ticks = iter([0.0, 1.0, 3.0, 6.0])  # retrieve begins, the disk is read, the copy ends
    r.worker._timer._clock = lambda: next(ticks)
    r.load(prompt(1, 2))
    assert r.worker._timer.take() == [
        KVTransfer(Tier.SSD, "load", 2 * CHUNK, 2 * CHUNK * r.bytes_per_token, 6.0, turn="r")
    ]
