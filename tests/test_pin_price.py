"""A second of pin costs a second while a turn waits for memory, and very little otherwise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench import BLOCK, Bench, prompt
from hypothesis import assume, given
from hypothesis import strategies as st
from test_policies import A_SECOND_A_TOKEN, SHORT, decide, learned, turn
from test_policy_properties import SLACK, distributions

from continuum_lmcache.policy.continuum import IDLE_PRICE
from continuum_lmcache.reload.rate_calibration import CalibratedCosts
from continuum_lmcache.retention.pin_renewal import DECISIONS_A_STEP
from continuum_lmcache.tools.durations import ToolDurations
from continuum_lmcache.types import ProgramId, TurnId

SOMEBODY = TurnId("somebody")


@given(distributions(), st.floats(0.0, 1000.0), st.floats(0.0, 1000.0))
def test_what_is_left_of_a_gap_is_the_conditional_distribution(seen, elapsed_s, more_s):
    over = seen.probability(elapsed_s)
    assume(seen.level != "cold" and over < 1.0)
    expected = (seen.probability(elapsed_s + more_s) - over) / (1.0 - over)
    near = {abs(elapsed_s + more_s - sample_s) < SLACK * 1e3 for sample_s in seen.samples_s}
    assert True in near or abs(seen.after(elapsed_s).probability(more_s) - expected) < SLACK


@given(st.floats(0.0, 100.0), st.floats(0.0, 100.0))
def test_a_gap_of_which_nothing_is_known_has_no_memory(elapsed_s, more_s):
    cold = ToolDurations().distribution(("bash",))
    assert cold.after(elapsed_s).probability(more_s) == cold.probability(more_s)


def test_the_cost_of_a_pin_is_part_of_the_decision():
    idle = replace(SHORT, is_memory_short=False)
    assert decide("continuum", turn(16), learned(), SHORT).cost_s == 4.0
    assert decide("continuum", turn(16), learned(), idle).cost_s == pytest.approx(IDLE_PRICE * 30.0)


def ttl_s(short: bool, tokens: int = 16, dram_tokens: int = 0, policy: str = "continuum") -> float:
    """The TTL after gaps of 1, 4 or 30 s of the tool; a token takes 1 s to compute, 0.1 s from DRAM."""
    state = replace(SHORT, is_memory_short=short)
    return float(decide(policy, turn(tokens, dram_tokens=dram_tokens), learned(), state).ttl_s)


def test_while_nobody_waits_for_memory_a_pin_waits_for_the_slowest_return():
    assert ttl_s(short=False) == 30.0


def test_while_somebody_does_it_is_priced_as_in_the_paper():
    assert ttl_s(short=True) == ttl_s(short=False, policy="continuum-published") == 4.0


def test_where_a_tier_brings_the_context_back_for_little_it_is_too():
    in_dram = {"short": False, "tokens": 100, "dram_tokens": 100}
    assert ttl_s(**in_dram) == ttl_s(**in_dram, policy="continuum-published") == 1.0


@pytest.fixture
def bench(make: Any, tmp_path: Path) -> Bench:
    """An engine that has learned the gaps above, with p's 17 tokens pinned 10 s ago."""
    made: Bench = make(policy="continuum", admission=False, run_output_dir=tmp_path)
    made.engine.learned.rates, made.engine.learned.gaps = CalibratedCosts(A_SECOND_A_TOKEN), learned()
    made.turn("p", prompt(BLOCK))
    made.advance(10.0)
    return made


def pinned(bench: Bench) -> bool:
    return bool(bench.engine.pins.pinned)


def test_a_pin_is_kept_while_nobody_waits_and_given_up_when_somebody_begins_to(bench: Bench) -> None:
    """A return saves 16 s; after 10 s only the gap of 30 s is left, and 20 s more cost more than that."""
    bench.send(None, prompt(10 * BLOCK, 1), out=60)
    bench.step()
    assert pinned(bench), "it runs beside the pin"
    bench.send(None, prompt(10 * BLOCK, 2))
    bench.step()
    bench.step(seconds=2.0)
    bench.step()
    assert not pinned(bench) and bench.engine.pins.outcomes.total() == 1


def test_a_pin_that_outlasts_every_gap_ends_on_an_idle_engine(bench: Bench) -> None:
    bench.advance(19.0)
    assert pinned(bench)
    bench.advance(2.0)
    assert not pinned(bench) and not bench.scheduler.has_requests()


def test_no_pin_outlives_its_ceiling_by_being_looked_at_again(bench: Bench) -> None:
    bench.engine.learned.gaps.observe(("other",), 1000.0)
    for _ in range(200):
        bench.engine.learned.gaps.observe(("bash",), 250.0)
    for _ in range(40):
        bench.advance(10.0)
        assert not pinned(bench) or bench.now_s - 1000.1 <= bench.engine.config.max_ttl_s
    assert not pinned(bench)


@pytest.mark.parametrize("away_s", [10.0, 30.0])
def test_while_nothing_is_learned_a_turn_that_waits_gets_the_memory_of_a_program_that_did_not_come_back(
    make: Any, away_s: float
) -> None:
    """Exp(1) has no memory: by it alone a return is as likely as at first, and an ended program's pin was set
    again until its ceiling of 300 s. A program is expected for 20 s."""
    bench: Bench = make(policy="continuum", admission=False)
    bench.engine.learned.rates = CalibratedCosts(A_SECOND_A_TOKEN)
    bench.turn("p", prompt(BLOCK))
    bench.advance(away_s)
    assert pinned(bench), "nobody waits"
    bench.engine.turns.refused_memory.add(SOMEBODY)
    for _ in range(8):
        bench.step(seconds=0.5)
    assert pinned(bench) is (away_s < 20.0)


@pytest.mark.parametrize(("ttl_s", "next_look_s"), [(0.01, 1.0), (5.0, 5.0)])
def test_a_pin_worth_a_moment_more_does_not_wake_an_idle_engine_at_every_moment(
    bench: Bench, ttl_s: float, next_look_s: float
) -> None:
    [pin] = bench.engine.pins.pinned.values()
    moment = replace(pin.retention, ttl_s=ttl_s)
    bench.engine.policy = replace(bench.engine.policy, retain=lambda *_: moment)
    bench.now_s = bench.scheduler.next_due_s()
    bench.step(seconds=0.0)
    assert bench.scheduler.next_due_s() == pytest.approx(bench.now_s + next_look_s)


def test_while_a_turn_waits_a_pin_gets_no_more_than_the_moment_that_it_is_worth(bench: Bench) -> None:
    [pin] = bench.engine.pins.pinned.values()
    moment = replace(pin.retention, ttl_s=0.01)
    bench.engine.policy = replace(bench.engine.policy, retain=lambda *_: moment)
    bench.engine.turns.refused_memory.add(SOMEBODY)
    bench.now_s = bench.scheduler.next_due_s()
    bench.step(seconds=0.0)
    assert bench.scheduler.next_due_s() == pytest.approx(bench.now_s + 0.01)


@pytest.mark.parametrize("due", [False, True])
def test_a_step_looks_at_few_pins_again_and_all_get_their_look(make: Any, due: bool) -> None:
    bench = make(100, policy="continuum", admission=False)
    engine = bench.engine
    engine.learned.rates, engine.learned.gaps = CalibratedCosts(A_SECOND_A_TOKEN), learned()
    for i in range(50):
        bench.turn(f"p{i}", prompt(BLOCK, i))
    bench.step()
    seen: list[int] = []
    retain = engine.policy.retain
    engine.policy = replace(engine.policy, retain=lambda *a: seen.append(a[0].program) or retain(*a))
    if due:
        bench.now_s = max(pin.deadline_s for pin in bench.engine.pins.pinned.values())
    else:
        bench.engine.turns.refused_memory.add(SOMEBODY)
    each: list[int] = []
    while len(set(seen)) < 50 and len(each) < 10:
        before = len(seen)
        bench.step(seconds=1.0)
        each.append(len(seen) - before)
    assert max(each) == DECISIONS_A_STEP and len(set(seen)) == 50


def test_a_pins_new_deadline_is_recorded(bench: Bench) -> None:
    bench.now_s = bench.scheduler.next_due_s()
    bench.step(seconds=0.0)
    events = bench.parts.files.recorder.snapshot()["p"]
    [pin] = bench.engine.pins.pinned.values()
    renewed = [event for event in events if "renewed_time" in event]
    assert renewed[-1]["deadline"] == pytest.approx(
        pin.deadline_s + bench.parts.files.recorder.epoch_s, abs=1e-5
    )


def test_memory_is_short_while_a_turn_that_was_refused_is_here_and_waits(bench: Bench) -> None:
    turns = bench.engine.turns
    assert not bench.engine.is_memory_short
    turns.refused_memory.add(SOMEBODY)
    assert bench.engine.is_memory_short
    turns.drop(SOMEBODY)
    assert not bench.engine.is_memory_short


def test_memory_is_short_while_a_program_waits_to_start(make: Any) -> None:
    bench = make(policy="continuum")
    for i in range(8):
        bench.send(f"p{i}", prompt(100, i), out=4)
    bench.step()
    assert bench.engine.admission.is_waited_for and not bench.engine.turns.refused_memory
    assert bench.engine.is_memory_short
    bench.run_until_idle(5000)
    assert not bench.engine.is_memory_short


def test_a_program_that_starts_at_once_takes_no_pin(make: Any) -> None:
    """After 10 s of its tool a pin is not worth the other 20 at the full price."""
    bench = make(200, policy="continuum")
    bench.engine.learned.rates, bench.engine.learned.gaps = CalibratedCosts(A_SECOND_A_TOKEN), learned()
    bench.turn("p", prompt(BLOCK))
    bench.send("runs", prompt(BLOCK, 1), out=60)
    for _ in range(5):
        bench.step(seconds=2.0)
    bench.send("starts", prompt(BLOCK, 2))
    bench.step()
    assert not bench.engine.admission.is_waited_for and "p" in bench.engine.pins.pinned


def test_what_shared_pins_free_is_counted_once_and_no_further_than_wanted(bench: Bench) -> None:
    first = bench.turn("q", prompt(3 * BLOCK, 5))
    bench.turn("r", [*first, *prompt(BLOCK, 6)])
    blocks, pinned = bench.parts.blocks, bench.engine.pins.pinned

    def held(program: str) -> Any:
        return pinned[ProgramId(program)].block_ids

    assert not blocks.can_free([held("q")], 1), "r's pin holds the same blocks"
    assert blocks.can_free(map(held, "qr"), 4) and not blocks.can_free(map(held, "qr"), 5)
    programs = iter(["p", "q", "r"])
    assert blocks.can_free(map(held, programs), 1) and list(programs) == ["q", "r"]
