"""Models with layers of several kinds: what a pin keeps of each group, and what the next turn reuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bench import BLOCK, Bench, prompt
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

from continuum_lmcache.vllm_plugin.scheduler import ContinuumScheduler

HEAD = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
FULL = FullAttentionSpec(**HEAD)
PAGE_VALUES = FULL.page_size_bytes // 4
WINDOW = SlidingWindowSpec(**HEAD, sliding_window=4 * BLOCK)
STATE = MambaSpec(
    block_size=BLOCK, shapes=((PAGE_VALUES,),), dtypes=(torch.float32,), mamba_cache_mode="align"
)


@pytest.mark.parametrize(
    ("other", "most_blocks"), [(WINDOW, 5), (STATE, 2)], ids=["sliding windows", "states"]
)
def test_a_pin_keeps_of_each_group_what_a_return_reuses_and_no_more(
    model: Path, settings: Any, other: Any, most_blocks: int
) -> None:
    settings(policy="static-ttl", static_ttl_s=1000)
    bench = Bench(ContinuumScheduler, model, 400, 64, spec=[FULL, other, other, other])
    bench.scheduler.need_mamba_block_aligned_split = other is STATE
    history = bench.turn("p", prompt(32 * BLOCK), out=4)
    pinned = bench.engine.pins.pinned_blocks
    assert 32 < pinned <= 32 + 3 * most_blocks
    for story in range(1, 13):  # together more than the cache has
        bench.turn(f"other-{story}", prompt(32 * BLOCK, story), is_last_step=True)
    assert bench.engine.pins.pinned_blocks == pinned
    bench.turn("p", [*history, *prompt(7, 99)])
    assert bench.parts.residency.prompt_tokens["gpu"] == 32 * BLOCK
    bench.scheduler.shutdown()
