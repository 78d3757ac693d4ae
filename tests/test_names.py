"""A name is checked against the prompts that have it. On vLLM's own scheduler, in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bench import Bench, prompt

from continuum_lmcache.reload.cost_model import CostModel, PrefillCurve, TransferRate
from continuum_lmcache.reload.rate_calibration import CalibratedCosts
from continuum_lmcache.telemetry.events import PinReleased, PinTaken, TurnFinished
from continuum_lmcache.types import PinEnd
from continuum_lmcache.vllm_plugin.scheduler import ContinuumScheduler

NONE = TransferRate(bytes_per_s=1.0, fixed_s=0.0, samples=1)
CURVE = PrefillCurve(fixed_s=0.0, per_token_s=1e-2, per_pair_s=0.0, samples=1)
COSTS = CostModel(prefill=CURVE, dram=NONE, ssd=NONE, kv_bytes_per_token=1, chunk_tokens=1)
HEAD = prompt(32, 5)  # the same at every turn


@pytest.fixture
def bench(model: Path, settings: Any) -> Bench:
    """One that knows its tool, of three seconds, and has room."""
    settings(policy="continuum")
    bench = Bench(ContinuumScheduler, model, 400)
    bench.engine.learned.rates = CalibratedCosts(COSTS)
    for _ in range(120):
        bench.engine.learned.gaps.observe(("bash",), 3.0)
    return bench


def turn(bench: Bench, name: str, tokens: list[int], **fields: Any) -> list[int]:
    said = bench.turn(name, tokens, out=4, this_func_call="bash", **fields)
    bench.now_s += 0.5
    return said


def reasons(bench: Bench) -> list[str]:
    return [e.retention.reason for e in bench.events_of(TurnFinished) if e.retention is not None]


def test_a_program_whose_prompts_change_is_pinned_a_few_times_then_no_more_and_again_once_they_repeat(
    bench: Bench,
) -> None:
    for number in range(8):
        story = turn(bench, "agent", HEAD + prompt(400, 10 + number))
    pins = len(bench.events_of(PinTaken))
    assert 2 <= pins <= 4 and reasons(bench)[-1] == "diverges"
    assert "agent" not in bench.engine.pins.pinned
    for number in range(4):
        story = turn(bench, "agent", story + prompt(8, number))
    assert "agent" in bench.engine.pins.pinned and reasons(bench)[-1] == "cdf"


def test_a_sessions_short_requests_end_no_pin_of_its_main_turns(bench: Bench) -> None:
    story = prompt(400, 1)
    for number in range(4):
        story = turn(bench, "session", story) + prompt(8, number)
        turn(bench, "session", prompt(120, 50 + number))
    ends = [e.why for e in bench.events_of(PinReleased) if e.program == "session"]
    assert ends == [PinEnd.REUSED] * 3
    assert bench.engine.programs.records["session"].turns == 4


def test_conversations_that_come_one_after_the_other_under_one_name_are_told_apart(bench: Bench) -> None:
    """They share their system prompt, and no two of their turns are live at once."""
    stories = {n: HEAD + prompt(200, 10 + n) for n in range(3)}
    for number in range(5):
        for n, story in stories.items():
            stories[n] = turn(bench, "everybody", story) + prompt(8, number)
    ends = [e.why for e in bench.events_of(PinReleased)]
    assert len(bench.engine.pins.pinned) == 3
    assert ends.count(PinEnd.REUSED) >= 3 * 3 and ends.count(PinEnd.DIVERGED) <= 2


def test_a_compacted_prompt_is_its_programs_next_turn(bench: Bench) -> None:
    turn(bench, "agent", HEAD + prompt(400, 1))
    turn(bench, "agent", HEAD + prompt(100, 2))
    assert bench.engine.programs.records["agent"].turns == 2
