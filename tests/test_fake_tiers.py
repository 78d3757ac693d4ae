"""The fake connector's tiers, in virtual time, and its settings."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from contract.stores import FakeStore
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from connectors.fake.scheduler_side import FakeSchedulerSide, tiers_of
from connectors.tier_model import GB, TierSpec, TwoTierCache, chunk_names
from continuum_lmcache.errors import ConfigError
from continuum_lmcache.reload.tier_store import TierHit

CHUNK, BYTES = 4, 250  # a chunk is 1,000 bytes: a rate of 1e-6 GB/s moves one in a second
SLOW = 1e-6


def a_store(dram_chunks: float, ssd_chunks: float = 0, **rates: float) -> TwoTierCache:
    chunk_gb = CHUNK * BYTES / GB
    spec = TierSpec(dram_chunks * chunk_gb, ssd_chunks * chunk_gb, CHUNK, **rates)
    return TwoTierCache(spec, BYTES)


def test_a_write_to_the_disk_is_not_there_before_it_ends() -> None:
    store = a_store(2, 10, ssd_store_gbps=SLOW)
    store.store(0.0, "abcd")  # DRAM has room for a and b; the disk takes 4 s
    assert store.locate(0.0, "abcd") == TierHit(2 * CHUNK, 0)
    assert store.locate(2.9, "abcd") == TierHit(2 * CHUNK, 0)
    assert store.locate(3.0, "abcd") == TierHit(2 * CHUNK, CHUNK)
    assert store.locate(4.0, "abcd") == TierHit(2 * CHUNK, 2 * CHUNK)


def test_a_stored_head_is_evicted_first_and_a_hit_head_last() -> None:
    store = a_store(4)
    store.store(0.0, "abcd")
    store.store(1.0, "x")
    assert list(store.dram.names) == list("bcdx")
    store = a_store(4)
    store.store(0.0, "abcd")
    store.load(1.0, "abcd")
    store.store(2.0, "x")
    assert list(store.dram.names) == list("cbax")


def test_the_disk_serves_only_what_follows_the_run_in_dram() -> None:
    """The head on the disk alone, the tail in DRAM: all of it counts for the disk, as in LMCache 0.5.6."""
    store = a_store(4, 10)
    store.store(0.0, "abcdef"[:4])
    store.store(0.0, "xy")  # pushes a and b out of DRAM
    assert store.locate(0.0, "abcd") == TierHit(0, 4 * CHUNK)
    del store.ssd.names["c"]
    assert store.locate(0.0, "abcd") == TierHit(0, 2 * CHUNK)


def test_neither_a_store_nor_a_load_pushes_its_own_head_out_of_dram() -> None:
    store = a_store(3, 10)
    store.store(0.0, "abcd")
    store.finish_writes(0.0)
    assert store.locate(0.0, "abcd") == TierHit(3 * CHUNK, CHUNK)
    assert store.load(0.0, "abcd").ssd == "d"
    assert store.locate(0.0, "abcd") == TierHit(3 * CHUNK, CHUNK)


def test_loads_queue_on_their_links() -> None:
    store = a_store(10, 10, load_gbps=SLOW, ssd_load_gbps=SLOW / 2, load_latency_s=0.5)
    store.store(0.0, "abc")
    assert store.load(0.0, "ab").done_s == 2.5
    assert store.load(1.0, "abc").done_s == 5.5
    assert store.load(9.0, "abc", gpu_tokens=2 * CHUNK).done_s == 10.5
    del store.dram.names["b"], store.dram.names["c"]
    assert store.load(20.0, "abc").done_s == 20.0 + 2 * 2 + 3 + 0.5  # the disk, then one copy of all
    assert store.locate(20.0, "abc") == TierHit(3 * CHUNK, 0)


@pytest.mark.parametrize(("in_dram", "on_disk"), [(1, 1), (1, 0), (0, 0)])
def test_a_rule_decides_how_far_a_prompt_is_loaded(in_dram: int, on_disk: int) -> None:
    """Two chunks are in DRAM, two on the disk alone. What is computed is stored to DRAM."""
    store = FakeStore(9, 9)
    half, prompt = 2 * store.chunk_tokens, list(range(4 * store.chunk_tokens + 1))
    store.run(prompt)
    store.settle()
    for name in chunk_names(prompt, store.chunk_tokens)[2:]:
        del store.scheduler_side.store.dram.names[name]
    select = lambda _, where: in_dram * where.dram_tokens + on_disk * where.ssd_tokens  # noqa: E731
    store.scheduler_side.load_selector = select
    assert store.run(prompt) == TierHit(half * in_dram, half * on_disk)
    store.check()
    assert store.locate(prompt) == TierHit(2 * half, 0)


@pytest.mark.parametrize(
    ("of_request", "offered"), [({}, 32), ({"cache_salt": "tenant"}, 0), ({"lora_request": object()}, 0)]
)
def test_tenants_and_adapters_do_not_share(of_request: dict[str, Any], offered: int) -> None:
    store, prompt = FakeStore(9, 9), list(range(33))
    store.run(prompt)
    request = SimpleNamespace(**vars(store._request(prompt)) | of_request)
    assert store.scheduler_side.offered_tokens(request, 0) == offered  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"fake.dram_gbb": 1}, "unknown key fake.dram_gbb.*did you mean fake.dram_gb"),
        ({"fake.dram_gb": -1}, "dram_gb of a tier is -1.0; it must be 0 or more"),
        ({"fake.dram_gb": "much"}, "fake.dram_gb is 'much'; it must be a number"),
        ({"fake.chunk_tokens": 0}, "chunk_tokens of a tier is 0; it must be more than 0"),
        ({"fake.chunk_tokens": 2.5}, "fake.chunk_tokens is 2.5"),
        ({"fake.load_gbps": 0}, "load_gbps of a tier is 0"),
        ({"fake.async": True}, "unknown key fake.async"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused(extra: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        tiers_of(extra)


def test_chunks_must_be_whole_blocks() -> None:
    with pytest.raises(ConfigError, match="chunk_tokens is 256.*a multiple of the engine's blocks of 96"):
        FakeSchedulerSide(TierSpec(), bytes_per_token=1, block_tokens=96, clock=lambda: 0.0)


class Tiers(RuleBasedStateMachine):
    """Turns, time, drops and lookups in any order: a load returns what was located."""

    def __init__(self) -> None:
        super().__init__()
        self.store = FakeStore(5, 7, ssd_store_gbps=1e-7, load_gbps=1e-7)  # a chunk takes 2.56 s
        self.prompts = [[i] for i in range(3)]

    @rule(
        which=st.integers(0, 2),
        extra=st.integers(0, 40),
        gpu_blocks=st.integers(0, 30),
        again=st.booleans(),
    )
    def turn(self, which: int, extra: int, gpu_blocks: int, again: bool) -> None:
        draw = random.Random(extra)
        start = (
            self.prompts[which][:1] if len(self.prompts[which]) > 120 and not again else self.prompts[which]
        )
        prompt = self.prompts[which] = [*start, *(draw.randrange(9) for _ in range(extra))]
        block = self.store.block_tokens
        gpu_tokens = min(gpu_blocks, (len(prompt) - 1) // block) * block
        located = self.store.locate(prompt)
        total = located.dram_tokens + located.ssd_tokens
        brought = self.store.run(prompt, gpu_tokens)
        dram = max(0, located.dram_tokens - gpu_tokens)
        assert brought == TierHit(dram, max(0, total - gpu_tokens) - dram)

    @rule(seconds=st.floats(0, 20))
    def wait(self, seconds: float) -> None:
        self.store.now_s += seconds

    @rule(which=st.integers(0, 2))
    def forget(self, which: int) -> None:
        self.store.forget(self.prompts[which])
        assert self.store.locate(self.prompts[which]) == TierHit(0, 0)

    @invariant()
    def books_balance(self) -> None:
        self.store.check()


Tiers.TestCase.settings = settings(max_examples=settings.default.max_examples // 4, stateful_step_count=40)
TestTiers = Tiers.TestCase
