"""The cost of a return and its forecast: by hand, on a curve of 1 ms a token."""

from __future__ import annotations

import pytest

from continuum_lmcache.reload.cost_model import PrefillCurve
from continuum_lmcache.reload.forecast_tracker import ReloadTracker, StepWork
from continuum_lmcache.reload.tier_store import KVTransfer
from continuum_lmcache.types import ProgramId, Tier, TurnId

CURVE = PrefillCurve(fixed_s=0.5, per_token_s=1e-3, per_pair_s=0.0, samples=9)
P, T, OTHER = ProgramId("p"), TurnId("t"), TurnId("other")


def away(context_tokens: int = 1000, reload_s: float = 0.7) -> ReloadTracker:
    tracker = ReloadTracker()
    tracker.add_forecast(P, context_tokens, reload_s)
    return tracker


def load(seconds: float, turn: str = "t") -> KVTransfer:
    return KVTransfer(Tier.DRAM, "load", 600, 600, seconds, turn)


def test_a_return_costs_its_load_and_the_contexts_share_of_what_was_computed():
    """600 of 1,000 context tokens are loaded in 0.2 s; 400 are computed with 100 new ones in 1.0 s."""
    tracker = away()
    tracker.on_allocated(T, P, gpu_tokens=0, loaded_tokens=600, prompt_tokens=1100)
    [found] = tracker.on_step(StepWork(1.2, {T: (500, 600)}), [load(0.2)], CURVE)
    assert (found.predicted_s, found.load_s) == (0.7, 0.2)
    assert (found.loaded_tokens, found.computed_tokens) == (600, 400)
    assert found.took_s == pytest.approx(0.2 + 1.0 * 400 / 500)


def test_a_step_is_shared_with_whoever_else_computed_in_it():
    tracker = away()
    tracker.on_allocated(T, P, 0, 0, 1000)
    [found] = tracker.on_step(StepWork(3.0, {T: (1000, 0), OTHER: (2000, 0)}), [], CURVE)
    assert found.took_s == pytest.approx(1.0)


def test_a_long_prefill_is_summed_over_its_steps_and_other_loads_are_not_its_own():
    tracker = away()
    tracker.on_allocated(T, P, 0, 0, 1500)
    assert tracker.on_step(StepWork(1.0, {T: (600, 0)}), [], CURVE) == []
    [found] = tracker.on_step(StepWork(3.0, {T: (900, 600)}), [load(1.2, "other")], CURVE)
    assert found.load_s == 0.0
    assert found.took_s == pytest.approx(1.0 + (3.0 - 1.2) * 400 / 900)


def test_a_load_beside_the_steps_takes_nothing_from_them():
    tracker = away()
    tracker.on_allocated(T, P, 0, 600, 1000)
    beside = KVTransfer(Tier.DRAM, "load", 600, 600, 5.0, "t", in_step=False)
    assert tracker.on_step(StepWork(0.1, {OTHER: (1, 50)}), [beside], CURVE) == []
    [found] = tracker.on_step(StepWork(0.4, {T: (400, 600)}), [], CURVE)
    assert found.took_s == pytest.approx(5.4)


@pytest.mark.parametrize("gpu_tokens", [1000, 1024])
def test_a_context_that_never_left_the_gpu_is_no_reload(gpu_tokens):
    tracker = away()
    tracker.on_allocated(T, P, gpu_tokens, 0, 1100)
    assert not tracker.is_tracking


def test_a_turn_that_ends_in_the_step_that_completes_it_still_counts():
    """One token of output: vLLM frees the request before the step is reported."""
    tracker = away()
    tracker.on_allocated(T, P, 0, 0, 1000)
    tracker.on_turn_end(T)
    assert len(tracker.on_step(StepWork(1.0, {T: (1000, 0)}), [], CURVE)) == 1


def test_a_turn_that_was_aborted_half_way_is_forgotten():
    tracker = away()
    tracker.on_allocated(T, P, 0, 0, 1000)
    tracker.on_step(StepWork(1.0, {T: (10, 0)}), [], CURVE)
    tracker.on_turn_end(T)
    assert tracker.on_step(StepWork(1.0, {OTHER: (10, 0)}), [], CURVE) == []
    assert not tracker.is_tracking


def test_a_forecast_is_compared_once_and_ends_with_its_program():
    tracker = away()
    tracker.on_allocated(T, P, 0, 0, 1000)
    tracker.on_step(StepWork(1.0, {T: (1000, 0)}), [], CURVE)
    tracker.on_allocated(OTHER, P, 0, 0, 1000)
    assert not tracker.is_tracking
    tracker.add_forecast(P, 1000, 1.0)
    tracker.on_program_end(P)
    tracker.on_allocated(OTHER, P, 0, 0, 1000)
    assert not tracker.is_tracking
