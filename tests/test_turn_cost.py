"""What a turn of a long context costs beside stock: calls are counted, not milliseconds."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from bench import BLOCK, Bench, prompt
from vllm.v1.core.sched.scheduler import Scheduler

from continuum_lmcache.types import ProgramId
from continuum_lmcache.vllm_plugin.scheduler import ContinuumScheduler

Make = Callable[..., Bench]
SHORT, LONG = 32, 224  # blocks of a context
COUNTED = ("add_request", "schedule", "update_from_output")  # a turn's arrival, its start, its end
ALL = 3 * LONG  # blocks of the cache


def calls_of_a_turn(model: Path, cls: type[Scheduler], blocks: int, program: str | None) -> Counter[str]:
    """How many calls of Python and C a program's third turn makes in each of vLLM's, vLLM's own included."""
    bench = Bench(cls, model, blocks=ALL, checks_hits=False)
    history = prompt(blocks * BLOCK)
    for _ in range(2):  # each path has run once
        history = bench.turn(program, history + prompt(20, 9), out=2, this_func_call="bash")
    counts = Counter[str]()
    for name in COUNTED:
        setattr(bench.scheduler, name, partial(counted, counts, name, getattr(bench.scheduler, name)))
    bench.turn(program, history + prompt(20, 9), out=2, this_func_call="bash")
    return counts


def counted(counts: Counter[str], name: str, call: Callable[..., Any], *args: Any) -> Any:
    def count(_: Any, event: str, __: Any) -> None:
        counts[name] += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        return call(*args)
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("program", ["p", None])
def test_no_call_count_of_a_turn_grows_with_its_context_beyond_stocks_own(
    model: Path, settings: Callable[..., None], program: str | None
) -> None:
    settings(static_ttl_s=60)
    stock, ours = (
        {blocks: calls_of_a_turn(model, cls, blocks, program) for blocks in (SHORT, LONG)}
        for cls in (Scheduler, ContinuumScheduler)
    )
    for name in COUNTED:
        grown, stocks = ours[LONG][name] - ours[SHORT][name], stock[LONG][name] - stock[SHORT][name]
        slack = 20 * (LONG // SHORT)  # of a bisection
        assert grown <= stocks + slack, f"{name} of {LONG} blocks: {grown} calls more, stock's {stocks}"
    assert ours[LONG]["schedule"] < stock[LONG]["schedule"] / 2, "the pin knows the hit"


# what a pin finds --------------------------------------------------------------


def hit_blocks(bench: Bench, tokens: list[int], **fields: Any) -> int:
    """How many blocks the program's next turn finds in the cache."""
    before = bench.parts.residency.prompt_tokens["gpu"]
    bench.turn("p", tokens, **fields)
    return (bench.parts.residency.prompt_tokens["gpu"] - before) // BLOCK


@pytest.fixture
def pinned(make: Make) -> Bench:
    """A program that is away, with a pin of ten blocks."""
    bench = make(cls=ContinuumScheduler, blocks=40, static_ttl_s=60)
    bench.turn("p", prompt(10 * BLOCK))
    assert bench.engine.pins.pinned[ProgramId("p")].blocks == 10
    return bench


@pytest.mark.parametrize(
    ("same_tokens", "new_tokens", "found"),
    [
        (160, 40, 10),
        (160, 0, 9),
        (100, 90, 6),
        (16, 90, 1),
        (0, 90, 0),
        (64, 0, 3),
    ],
)
def test_a_prompt_finds_the_pins_blocks_down_to_the_deepest_common_one(
    pinned: Bench, same_tokens: int, new_tokens: int, found: int
) -> None:
    assert hit_blocks(pinned, prompt(same_tokens) + prompt(new_tokens, 9)) == found


def test_a_block_of_a_pin_whose_load_has_failed_ends_the_hit_before_it(pinned: Bench) -> None:
    block_ids = pinned.engine.pins.pinned[ProgramId("p")].block_ids
    pinned.scheduler.kv_cache_manager.evict_blocks({block_ids[4]})
    assert hit_blocks(pinned, prompt(11 * BLOCK)) == 4


def test_a_turn_that_may_not_read_the_cache_finds_nothing_by_its_pin(pinned: Bench) -> None:
    assert hit_blocks(pinned, prompt(11 * BLOCK), skip_reading_prefix_cache=True) == 0


def test_new_weights_and_a_reset_leave_no_pin_to_find_anything_by(pinned: Bench) -> None:
    pinned.scheduler.on_new_weights("update_weights")
    assert hit_blocks(pinned, prompt(11 * BLOCK)) == 0
    assert pinned.scheduler.reset_prefix_cache()
    assert hit_blocks(pinned, prompt(12 * BLOCK)) == 0


def test_beside_a_draft_model_a_hit_from_a_pin_ends_a_block_early_as_vllms_does(pinned: Bench) -> None:
    pinned.scheduler.kv_cache_manager.coordinator.eagle_group_ids.add(0)
    assert hit_blocks(pinned, prompt(11 * BLOCK)) == 9


# how a pin is freed ------------------------------------------------------------


def test_a_pins_blocks_are_freed_tail_first(pinned: Bench) -> None:
    block_ids = list(pinned.engine.pins.pinned[ProgramId("p")].block_ids)
    pinned.advance(61)
    assert latest_freed(pinned, 10) == block_ids[::-1]


def test_of_a_pin_whose_head_another_turn_uses_the_rest_is_freed_tail_first(pinned: Bench) -> None:
    block_ids = list(pinned.engine.pins.pinned[ProgramId("p")].block_ids)
    pinned.send("q", prompt(4 * BLOCK) + prompt(10, 9), out=20)
    pinned.step()
    pinned.step(61)
    pinned.step()
    assert latest_freed(pinned, 6) == block_ids[4:][::-1]


def latest_freed(bench: Bench, count: int) -> list[int]:
    """The free blocks that are reused last."""
    free = bench.scheduler.kv_cache_manager.block_pool.free_block_queue.get_all_free_blocks()
    return [block.block_id for block in free][-count:]


def test_a_pin_takes_the_references_of_its_turn_over_and_adds_none(pinned: Bench) -> None:
    blocks = pinned.scheduler.kv_cache_manager.block_pool.blocks
    block_ids = pinned.engine.pins.pinned[ProgramId("p")].block_ids
    assert [blocks[i].ref_cnt for i in block_ids] == [1] * 10
