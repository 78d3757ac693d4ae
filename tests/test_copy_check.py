"""LMCache in-process is refused at the start if it does not bring back the KV that it stored."""

from __future__ import annotations

import pytest

pytest.importorskip("lmcache")

import torch
from lmcache_rig import CHUNK, LAYERS, SLOTS

from connectors.lmcache.copies.check import refuse_wrong_copies
from continuum_lmcache.errors import ConfigError


@pytest.fixture
def worker(rig):
    return rig(dram_chunks=4)


def caches(worker) -> dict[str, torch.Tensor]:
    return {f"layer.{n}": layer for n, layer in enumerate(worker.kv)}


def test_a_copy_that_brings_all_bytes_back_is_accepted(worker):
    refuse_wrong_copies(worker.engine, caches(worker), CHUNK, SLOTS)


def test_a_load_that_writes_nothing_is_refused(worker, monkeypatch):
    monkeypatch.setattr(worker.engine.gpu_connector, "batched_to_gpu", lambda *_, **__: None)
    with pytest.raises(ConfigError, match=f"{LAYERS} of {LAYERS} layers differ"):
        refuse_wrong_copies(worker.engine, caches(worker), CHUNK, SLOTS)


def test_one_byte_of_one_layer_is_enough(worker, monkeypatch):
    load = worker.engine.gpu_connector.batched_to_gpu

    def wrong_by_one(chunks, *args, **kwargs):
        chunks[0].tensor.view(torch.uint8).view(-1)[-1] += 1
        load(chunks, *args, **kwargs)

    monkeypatch.setattr(worker.engine.gpu_connector, "batched_to_gpu", wrong_by_one)
    with pytest.raises(ConfigError, match=f"1 of {LAYERS} layers differ"):
        refuse_wrong_copies(worker.engine, caches(worker), CHUNK, SLOTS)


def test_the_blocks_and_the_pool_are_as_they_were_afterwards(worker, monkeypatch):
    for layer in worker.kv:
        layer.uniform_()
    before = [layer.clone() for layer in worker.kv]
    free = worker.cpu.memory_allocator.pin_allocator.num_active_allocations
    refuse_wrong_copies(worker.engine, caches(worker), CHUNK, SLOTS)
    monkeypatch.setattr(worker.engine.gpu_connector, "batched_to_gpu", lambda *_, **__: None)
    with pytest.raises(ConfigError):
        refuse_wrong_copies(worker.engine, caches(worker), CHUNK, SLOTS)
    assert all(torch.equal(a, b) for a, b in zip(before, worker.kv, strict=True))
    assert worker.cpu.memory_allocator.pin_allocator.num_active_allocations == free


def test_a_layer_whose_kernel_blocks_are_parts_of_vllms_is_checked_too(worker, monkeypatch):
    """An attention kernel may take smaller blocks than the scheduler counts: two for one here."""
    halves = {name: layer.view(2 * SLOTS, 1, CHUNK // 2, -1) for name, layer in caches(worker).items()}
    whole = dict(zip(halves, worker.kv, strict=True))
    copier = worker.engine.gpu_connector
    for name in ("batched_from_gpu", "batched_to_gpu"):
        stock = getattr(copier, name)
        monkeypatch.setattr(
            copier, name, lambda *a, stock=stock, **kw: stock(*a, **kw | {"kvcaches": list(whole.values())})
        )
    refuse_wrong_copies(worker.engine, halves, CHUNK, SLOTS)


def test_a_rank_that_stores_nothing_has_nothing_to_check(worker, monkeypatch):
    with monkeypatch.context() as until:  # the engine needs it to close
        until.setattr(worker.engine, "storage_manager", None)
        refuse_wrong_copies(worker.engine, caches(worker), CHUNK, SLOTS)
