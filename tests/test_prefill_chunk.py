"""A step's budget, by the times of the steps before it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from continuum_lmcache.policy.continuum import PROMPT_TOKENS, SMALLEST_TOKENS, chunk
from continuum_lmcache.policy.interface import StepState
from continuum_lmcache.steps.step_times import LEAST_STEPS, StepTimes

FIXED_S, TOKEN_S = 0.010, 1e-4


def measured(
    fixed_s: float = FIXED_S, token_s: float = TOKEN_S, steps: int = 200, noise: float = 0.0
) -> StepTimes:
    """After steps with prompts of 128 to 2,048 tokens, each beside decodes."""
    times, draw = StepTimes(), random.Random(1)
    for _ in range(steps):
        tokens = draw.randrange(128, 2048)
        took_s = (fixed_s + token_s * tokens) * draw.uniform(1 - noise, 1 + noise)
        times.on_prompts(took_s, tokens, TOKEN_S * tokens)
        times.on_decodes(took_s, 1.0)
    return times


class Steps:
    """Of a server whose prompts take much of the time."""

    def __init__(self, most_tokens: int, times: StepTimes) -> None:
        self.most_tokens, self.times = most_tokens, times

    def budget_tokens(
        self, decoding: int, running: int, waiting: int, each: int = 1, singles: int = 0
    ) -> int:
        turns = (running, decoding, waiting, singles, each)
        state = StepState(self.most_tokens, *turns, 1.0, False, self.times)
        return chunk(state).tokens


def tuner(times: StepTimes, prompt_tokens: int = 300, most_tokens: int = 8192) -> Steps:
    """So many prompt tokens came for each ten that were decoded."""
    for _ in range(1000):
        times.on_schedule(prompt_tokens, 10)
    return Steps(most_tokens, times)


@pytest.mark.parametrize(("fixed_s", "token_s"), [(0.010, 1e-4), (0.0, 1e-4), (0.040, 7e-5), (0.040, 1.5e-4)])
def test_a_steps_fixed_time_is_told_from_its_tokens(fixed_s: float, token_s: float) -> None:
    """Also where the curve, 0.1 ms a token, is wrong by half: a quarter of that is left."""
    assert measured(fixed_s, token_s).prompt_s() == pytest.approx(
        (fixed_s, token_s), abs=0.25 * fixed_s + 1e-5
    )


def test_where_all_prompts_have_one_size_the_prefill_curve_says_what_tokens_cost() -> None:
    times = StepTimes()
    for _ in range(100):
        times.on_prompts(0.060, 500, 0.050)
    assert times.prompt_s() == pytest.approx((0.010, 1e-4))


def test_a_curve_that_is_too_slow_leaves_no_negative_fixed_time() -> None:
    times = StepTimes()
    for _ in range(100):
        times.on_prompts(0.030, 500, 0.050)
    assert times.prompt_s() == pytest.approx((0.0, 0.030 / 500))


def test_a_profile_in_which_tokens_cost_nothing_leaves_all_to_the_fixed_time() -> None:
    times = StepTimes()
    for _ in range(2 * LEAST_STEPS):
        times.on_prompts(0.030, 500, 0.0)
        times.on_decodes(0.030, 1.0)
    assert times.prompt_s() == (pytest.approx(0.030), 0.0)
    assert tuner(times).budget_tokens(10, 10, 0) == 8192


def test_where_nothing_ever_decodes_many_waiting_turns_share_a_step() -> None:
    """Scoring, pooling, or an engine that computes prompts for another one: no step has a decode."""
    times = StepTimes()
    chunks = Steps(8192, times)
    assert chunks.budget_tokens(0, 0, 400) == PROMPT_TOKENS
    for _ in range(2 * LEAST_STEPS):
        times.on_prompts(0.060, 2000, 0.050)
        times.on_schedule(2000, 0)
    assert chunks.budget_tokens(0, 0, 400) == 8192


def test_a_machine_that_became_slower_is_noticed_within_some_hundred_steps() -> None:
    times = measured()
    for _ in range(1000):
        times.on_prompts(0.2, 500, TOKEN_S * 500)
    assert times.prompt_s()[0] > 0.1


def test_until_enough_steps_were_seen_or_where_nothing_decodes_no_prompt_is_cut() -> None:
    assert tuner(measured(steps=LEAST_STEPS - 1)).budget_tokens(10, 10, 0) == 10 + PROMPT_TOKENS
    assert tuner(measured()).budget_tokens(0, 3, 0) == PROMPT_TOKENS
    assert Steps(8192, measured()).budget_tokens(10, 10, 0) == 10 + PROMPT_TOKENS, "none decoded"
    assert tuner(measured()).budget_tokens(10, 10, 0) < PROMPT_TOKENS


@pytest.mark.parametrize("most_tokens", [512, PROMPT_TOKENS])
def test_a_budget_of_2048_tokens_or_less_stays_vllms_own(most_tokens: int) -> None:
    for times in (measured(steps=LEAST_STEPS - 1), measured()):
        assert tuner(times, most_tokens=most_tokens).budget_tokens(10, 10, waiting=400) == most_tokens
        assert tuner(times, most_tokens=most_tokens).budget_tokens(0, 3, 0) == most_tokens


def test_the_more_turns_wait_the_more_prompts_share_a_step() -> None:
    """Its fixed part is that of 100 tokens, and a prompt has 2,048: 2 * sqrt(2048 * 100 * (1 + waiting))."""
    budgets = [tuner(measured()).budget_tokens(0, 3, waiting) for waiting in (0, 20, 200)]
    assert budgets == [PROMPT_TOKENS, pytest.approx(4147, rel=0.02), 8192]


def test_the_chunk_follows_what_prompts_need_beside_the_decodes() -> None:
    assert tuner(measured()).budget_tokens(10, 10, 0) == pytest.approx(310, abs=2)
    assert tuner(measured()).budget_tokens(2, 2, 0) == 2 + SMALLEST_TOKENS
    assert tuner(measured()).budget_tokens(100, 100, 0) == pytest.approx(3100, abs=20)
    assert tuner(measured()).budget_tokens(1000, 1000, 0) == 8192, "more than vLLM's own"


def test_a_chunk_takes_no_less_time_than_its_steps_fixed_part() -> None:
    times = StepTimes()
    for tokens in (128, 512, 2048) * 30:
        times.on_prompts(0.040 + 1e-4 * tokens, tokens, 1e-4 * tokens)
        times.on_decodes(0.300, 1.0)
    assert tuner(times, prompt_tokens=10).budget_tokens(4, 4, 0) == pytest.approx(4 + 400, abs=20)


def test_prompts_that_pile_up_are_not_starved_by_the_decodes_that_are_left() -> None:
    chunks = tuner(measured(), prompt_tokens=2000)
    few, piled_up = chunks.budget_tokens(2, 2, 0), chunks.budget_tokens(2, 10, 0)
    assert (few, piled_up) == (pytest.approx(402, abs=2), pytest.approx(2002, abs=2))


def test_a_prompt_is_not_cut_where_more_turns_wait_for_its_end_than_decode_beside_it() -> None:
    """Ten turns gain the time between two tokens, some 110 ms; each that waits loses 10 ms a step."""
    budgets = [tuner(measured()).budget_tokens(10, 10, waiting) for waiting in (0, 50, 95, 120, 400)]
    assert budgets == [pytest.approx(310, abs=2)] * 3 + [8192] * 2


def test_no_prompt_is_cut_while_a_request_that_is_no_programs_turn_waits() -> None:
    steps = tuner(measured())
    assert steps.budget_tokens(10, 10, 3) < 400
    assert steps.budget_tokens(10, 10, 3, singles=1) == 8192


def test_a_prompt_is_not_cut_where_a_step_costs_as_much_as_all_its_tokens() -> None:
    """As on a server whose own work takes longer than the model: the time between tokens is then a step's."""
    times = StepTimes()
    for tokens in (128, 200, 256) * 30:
        times.on_prompts(0.100 + 1e-5 * tokens, tokens, 1e-5 * tokens)
        times.on_decodes(0.100, 1.0)
    assert tuner(times, prompt_tokens=100).budget_tokens(3, 3, 1) == 8192


def test_drafts_are_part_of_a_decodes_share() -> None:
    plain, drafting = (tuner(measured()).budget_tokens(10, 10, 0, each) for each in (1, 4))
    assert (plain, drafting) == (pytest.approx(310, abs=2), pytest.approx(40 + 1200, abs=8))


@given(
    most=st.integers(1, 20_000),
    turns=st.tuples(st.integers(0, 300), st.integers(0, 300), st.integers(0, 1000)),
    tokens=st.tuples(st.integers(0, 9000), st.integers(0, 300)),
    step=st.tuples(st.floats(0, 1), st.floats(0, 0.01)),
)
def test_the_budget_is_never_above_vllms_and_never_starves_prompts(
    most: int, turns: tuple[int, int, int], tokens: tuple[int, int], step: tuple[float, float]
) -> None:
    chunks = Steps(most, measured(*step, steps=25))
    chunks.times.on_schedule(*tokens)
    decoding, more, waiting = turns
    budget = chunks.budget_tokens(decoding, decoding + more, waiting)
    assert 1 <= budget <= most
    assert budget == most or decoding + SMALLEST_TOKENS <= budget
