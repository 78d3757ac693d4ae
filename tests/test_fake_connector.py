"""The fake connector's bookkeeping of requests."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from connectors.fake.scheduler_side import FakeSchedulerSide
from connectors.tier_model import TierSpec, chunk_names


def a_planner() -> FakeSchedulerSide:
    config = TierSpec(dram_gb=1.0, chunk_tokens=8)
    return FakeSchedulerSide(config, bytes_per_token=250, block_tokens=4, clock=lambda: 0.0)


def a_request(request_id: str, tokens: int) -> Any:
    return SimpleNamespace(
        request_id=request_id,
        all_token_ids=list(range(tokens)),
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


def test_what_builds_on_a_load_from_before_the_tiers_were_emptied_is_not_stored() -> None:
    """Its turn waits for memory, and no step has named its blocks; found by the oracle's machine."""
    planner, blocks = a_planner(), [1, 2, 3, 4, 5, 6, 7, 8, 9]
    old, request = a_request("old", 17), a_request("r", 33)
    planner.offered_tokens(old, 0)
    planner.on_alloc(old, blocks[:5], 0)
    assert len(planner.step(output({"old": 17}, new={"old": blocks[:5]})).stores) == 2
    assert planner.offered_tokens(request, 0) == 16
    planner.on_alloc(request, blocks[:4], 16)
    planner.step(output({}))
    planner.store.clear()
    planner.reset()
    request.num_computed_tokens = 16
    assert not planner.step(output({"r": 17}, new={"r": blocks})).stores
    request.num_computed_tokens = 0
    assert planner.offered_tokens(request, 0) == 0
    planner.on_alloc(request, blocks, 0)
    assert len(planner.step(output({"r": 33}, new={"r": blocks})).stores) == 4, "computed anew"
