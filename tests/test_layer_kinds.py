"""Models with layers of several kinds: what a pin keeps of each group, and what the next turn reuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bench import BLOCK, Bench, prompt
from layer_kinds import FP8, GEMMA, LATENT, QWEN3_NEXT, STATE, WINDOW, WINDOW_BLOCKS

from continuum_lmcache.vllm_plugin.scheduler import ContinuumScheduler

CONTEXT = 16  # blocks
KINDS = {  # groups of layers, and blocks that a hit of the context needs of the others than full attention
    "Gemma, gpt-oss: windows beside full attention": (GEMMA, 3 * WINDOW_BLOCKS),
    "Qwen3-Next: states beside full attention": (QWEN3_NEXT, 3),
    "DeepSeek: latent attention": ([LATENT], 0),
    "KV in FP8": ([FP8], 0),
    "Mistral 7B v0.1: windows alone": ([WINDOW], WINDOW_BLOCKS),
    "Mamba: states alone": ([STATE], 1),
}


@pytest.mark.parametrize("has_draft", [False, True], ids=["", "and a draft model"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pin_keeps_of_each_group_what_a_return_reuses_and_no_more(
    model: Path, settings: Any, kind: str, has_draft: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM keeps windows and states at the last whole block of a prompt alone, so outputs are computed again.
    Beside a draft model a hit ends a block early. That block must be there, but of states."""
    groups, others = KINDS[kind]
    settings(policy="static-ttl", static_ttl_s=1000)
    monkeypatch.setattr("vllm.config.SpeculativeConfig.use_eagle", lambda _: has_draft)
    bench = Bench(ContinuumScheduler, model, 100, 64, spec=groups, drafts=int(has_draft))
    history = bench.turn("p", prompt(CONTEXT * BLOCK + 5), out=2 * BLOCK)
    keeps_all = WINDOW not in groups and STATE not in groups
    reached = CONTEXT + 2 if keeps_all else CONTEXT
    pinned, needed = bench.engine.pins.pinned_blocks, others + has_draft * groups.count(WINDOW)
    assert pinned == needed + (0 if groups[0] in (WINDOW, STATE) else reached)
    for story in range(1, 7):  # together more than the cache has
        bench.turn(f"other-{story}", prompt(CONTEXT * BLOCK, story), is_last_step=True)
    assert bench.engine.pins.pinned_blocks == pinned
    bench.turn("p", [*history, *prompt(7, 99)])
    assert bench.parts.residency.prompt_tokens["gpu"] == (reached - has_draft) * BLOCK
    bench.scheduler.shutdown()
