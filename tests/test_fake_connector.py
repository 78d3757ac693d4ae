"""The fake connector: its bookkeeping of requests, its settings, and real engines that reload from it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from connectors.fake.config import FakeConfig
from connectors.fake.scheduler_side import FakeSchedulerSide
from connectors.tier_model.lru_tier import chunk_names
from continuum_lmcache.errors import ConfigError

BYTES = 250  # a token


def a_planner(**config: Any) -> FakeSchedulerSide:
    chosen = {"dram_gb": 1.0, "chunk_tokens": 8, **config}
    return FakeSchedulerSide(FakeConfig(**chosen), BYTES, block_tokens=4, clock=lambda: 0.0)


def a_request(request_id: str, tokens: int, first: int = 0) -> Any:
    return SimpleNamespace(
        request_id=request_id,
        all_token_ids=list(range(first, first + tokens)),
        num_tokens=tokens,
        num_prompt_tokens=tokens,
        num_computed_tokens=0,
        cache_salt=None,
        lora_request=None,
        mm_features=[],
    )


def output(
    scheduled: dict[str, int],
    new: dict[str, Sequence[int]] | None = None,
    more: dict[str, Sequence[int]] | None = None,
    resumed: Sequence[str] = (),
) -> Any:
    new, more = new or {}, more or {}
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        scheduled_new_reqs=[SimpleNamespace(req_id=r, block_ids=(b,)) for r, b in new.items()],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(more), new_block_ids=[(b,) for b in more.values()], resumed_req_ids=set(resumed)
        ),
    )


def test_a_chunk_is_stored_by_the_step_that_completes_it() -> None:
    planner = a_planner()
    request = a_request("r", 20)
    assert planner.offered_tokens(request, 0) == 0
    planner.on_alloc(request, [1, 2], 0)
    first = planner.step(output({"r": 9}, new={"r": [1, 2, 3]}))
    assert [c.block_ids for c in first.stores] == [(1, 2)]
    request.num_computed_tokens = 9
    second = planner.step(output({"r": 11}, more={"r": [4, 5]}))
    assert [c.block_ids for c in second.stores] == [(3, 4)]
    assert not planner.step(output({"r": 0})).stores


def test_a_sampled_token_that_nobody_knows_yet_completes_no_chunk() -> None:
    """Asynchronous scheduling counts tokens before they are sampled; their chunk comes a step later."""
    planner = a_planner()
    request = a_request("r", 7)
    planner.offered_tokens(request, 0)
    planner.on_alloc(request, [1, 2], 0)
    planner.step(output({"r": 7}, new={"r": [1, 2]}))
    request.num_computed_tokens = 7
    assert not planner.step(output({"r": 1})).stores
    request.num_computed_tokens = 8
    request.all_token_ids.append(7)
    request.num_tokens = 8
    assert len(planner.step(output({"r": 1}, more={"r": [3]})).stores) == 1


def test_a_preempted_request_loads_what_it_had_stored() -> None:
    planner = a_planner()
    request = a_request("r", 20)
    planner.offered_tokens(request, 0)
    planner.on_alloc(request, [1, 2, 3, 4, 5], 0)
    planner.step(output({"r": 20}, new={"r": [1, 2, 3, 4, 5]}))
    request.num_computed_tokens = 0  # preempted: its blocks are gone
    assert planner.offered_tokens(request, 4) == 12
    planner.on_alloc(request, [9, 8, 7, 6, 5], 12)
    meta = planner.step(output({"r": 4}, more={"r": [9, 8, 7, 6, 5]}, resumed=["r"]))
    assert [(c.first, c.block_ids) for c in meta.loads[0].copies] == [(1, (8,)), (0, (7, 6))]
    assert not meta.stores
    assert planner.tracked["r"].block_ids == [9, 8, 7, 6, 5]


def test_the_last_token_is_always_computed() -> None:
    planner = a_planner()
    planner.store.store(0.0, chunk_names(range(16), 8))
    assert planner.offered_tokens(a_request("r", 16), 0) == 15
    assert planner.offered_tokens(a_request("s", 17), 0) == 16


def held_in_parts() -> FakeSchedulerSide:
    """Four chunks on the disk, of which the first two are in DRAM too."""
    planner = a_planner(ssd_gb=1.0)
    names = chunk_names(range(32), 8)
    planner.store.store(0.0, names)
    planner.store.finish_writes(0.0)
    for name in names[2:]:
        del planner.store.dram.names[name]
    return planner


@pytest.mark.parametrize(("in_dram", "on_disk", "loaded"), [(1, 1, 32), (1, 0, 16), (0, 0, 0)])
def test_a_rule_decides_how_far_a_prompt_is_loaded(in_dram: int, on_disk: int, loaded: int) -> None:
    """The rest is computed, and stored to DRAM if it is not there yet; nothing is lost."""
    planner, request = held_in_parts(), a_request("r", 33)
    planner.load_selector = lambda _, where: in_dram * where.dram_tokens + on_disk * where.ssd_tokens
    assert planner.offered_tokens(request, 0) == loaded
    at = list(range(9))
    planner.on_alloc(request, at, loaded)
    request.num_computed_tokens = loaded
    meta = planner.step(output({"r": 33 - loaded}, new={"r": at}))
    copies = [copy for job in meta.loads for copy in job.copies]
    assert len(copies) * 8 == loaded
    assert not meta.stores, "every chunk's bytes are kept already"
    planner.store.check()
    assert planner.store.locate(0.0, chunk_names(range(32), 8)).dram_tokens == 32


def test_tenants_and_adapters_do_not_share() -> None:
    planner = a_planner()
    planner.store.store(0.0, chunk_names(range(16), 8))
    salted, adapted = a_request("s", 17), a_request("a", 17)
    salted.cache_salt, adapted.lora_request = "tenant", object()
    assert planner.offered_tokens(salted, 0) == 0
    assert planner.offered_tokens(adapted, 0) == 0


# settings


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
        FakeConfig.load(extra)


def test_chunks_must_be_whole_blocks() -> None:
    with pytest.raises(ConfigError, match="chunk_tokens is 256.*a multiple of the engine's blocks of 96"):
        FakeSchedulerSide(FakeConfig(), bytes_per_token=1, block_tokens=96, clock=lambda: 0.0)
