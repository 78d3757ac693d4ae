"""The pin of a parent agent while it waits for its subagents, which are separate programs.

vLLM's real scheduler in virtual time. Blocks hold 16 tokens; a token takes 10 ms to compute, so the parent's
400 tokens are worth 4 s.
"""

from __future__ import annotations

from typing import Any

import pytest
from bench import BLOCK, Bench, prompt

from continuum_lmcache.reload.cost_model import CostModel, PrefillCurve, TransferRate
from continuum_lmcache.reload.rate_calibration import CalibratedCosts
from continuum_lmcache.types import PinEnd

CONTEXT = 25 * BLOCK
NO_TIER = TransferRate(bytes_per_s=1.0, fixed_s=0.0, samples=1)
COSTS = CostModel(
    prefill=PrefillCurve(fixed_s=0.0, per_token_s=1e-2, per_pair_s=0.0, samples=1),
    dram=NO_TIER,
    ssd=NO_TIER,
    kv_bytes_per_token=1,
    chunk_tokens=1,
)
LEARNED = {"Task": [10.0, 20.0, 30.0] * 40, "bash": [1.0] * 120}  # gaps in seconds, by tool
EXPERIENCE = {"nothing was learned yet": {}, "such calls take 10 to 30 s": LEARNED}


@pytest.fixture(params=EXPERIENCE.values(), ids=EXPERIENCE)
def bench(make: Any, request: pytest.FixtureRequest) -> Bench:
    """This project's policy, on a GPU with 59 blocks, without admission's line."""
    made: Bench = make(60, policy="continuum", admission=False)
    made.step_seconds = lambda output: 0.01 + 1e-2 * output.total_num_scheduled_tokens
    made.engine.learned.rates = CalibratedCosts(COSTS)
    for tool, gaps_s in request.param.items():
        for gap_s in gaps_s:
            made.engine.learned.gaps.observe((tool,), gap_s)
    return made


def pinned(bench: Bench) -> list[str]:
    return [str(program).rpartition("/")[2] for program in bench.engine.pins.pinned]


def parent_calls(bench: Bench) -> list[int]:
    """The parent's first turn, which ends in the call. Returns the head of its next turn."""
    return bench.turn("parent", prompt(CONTEXT), this_func_call="Task")


def found_of(bench: Bench, tokens: list[int]) -> int:
    """The parent's next turn; how much of its prompt was still on the GPU."""
    before = bench.parts.residency.prompt_tokens["gpu"]
    bench.turn("parent", [*tokens, *prompt(30, 99)], this_func_call="Task")
    return int(bench.parts.residency.prompt_tokens["gpu"] - before)


def test_a_parents_pin_lasts_through_many_turns_of_its_subagents(bench: Bench) -> None:
    """Three, one after the other, compute more than the GPU holds; none waits for memory."""
    tokens = parent_calls(bench)
    for child in range(3):
        said = prompt(10 * BLOCK, 10 + child)
        for _ in range(6):
            said = bench.turn(f"child {child}", said, this_func_call="bash") + prompt(BLOCK, 50 + child)
            bench.advance(1.0)
        assert "parent" in pinned(bench)
    assert found_of(bench, tokens) >= CONTEXT
    assert bench.engine.pins.outcomes[PinEnd.RECLAIMED] == 0


def test_where_memory_runs_out_the_subagents_pins_go_before_their_parents(bench: Bench) -> None:
    """They arrived later. The second one's prompt fits only without the first one's pin."""
    tokens = parent_calls(bench)
    bench.turn("child 1", prompt(15 * BLOCK, 1), this_func_call="bash")
    assert pinned(bench) == ["parent", "child 1"]
    bench.turn("child 2", prompt(22 * BLOCK, 2), this_func_call="bash")
    assert pinned(bench) == ["parent", "child 2"]
    assert bench.engine.pins.outcomes == {PinEnd.RECLAIMED: 1}
    assert found_of(bench, tokens) >= CONTEXT


@pytest.mark.parametrize("bench", [LEARNED], indirect=True)
def test_while_a_turn_waits_for_memory_a_parents_pin_is_worth_what_its_context_costs(bench: Bench) -> None:
    """A return saves 4 s and every second of pin costs one: 10 s or more do not pay."""
    parent_calls(bench)
    bench.send(None, prompt(20 * BLOCK, 1), out=200)
    bench.step()
    bench.send("child", prompt(25 * BLOCK, 2))
    assert "parent" in pinned(bench)
    for _ in range(30):
        bench.step(0.1)
    assert "parent" not in pinned(bench)
    assert bench.engine.pins.outcomes == {PinEnd.EXPIRED: 1}
    bench.run_until_idle()
