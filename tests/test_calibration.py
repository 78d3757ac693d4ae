"""Predicted against realised P(tau), with censored predictions."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded import KEEP, Run, written

from continuum_lmcache.recordings.metrics import ReturnPrediction, calibration, realised
from continuum_lmcache.recordings.reader import load
from continuum_lmcache.telemetry.events import ProgramEnded
from continuum_lmcache.telemetry.recorder import EventRecorder
from continuum_lmcache.types import PinEnd, ProgramId, Retention


def test_kaplan_meier_by_hand() -> None:
    """Of 4, one is back at 1 of 4 s, one is censored at 2, one is back at 3, one is away for all 4.

    Away after 1 s: 3/4. After 3 s, with two left at risk: 3/4 * 1/2. Realised: 1 - 3/8 = 0.625; without
    the censored one it would be 2/3.
    """
    seen = [(1.0, True), (2.0, False), (3.0, True), (9.0, True)]
    assert realised([ReturnPrediction(0.5, 4.0, at_s, back) for at_s, back in seen]) == pytest.approx(0.625)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=30), st.floats(0.1, 10))
def test_without_censoring_the_realised_share_is_a_plain_count(gaps_s: list[float], ttl_s: float) -> None:
    found = realised([ReturnPrediction(0.5, ttl_s, gap_s, True) for gap_s in gaps_s])
    assert found == pytest.approx(sum(gap_s <= ttl_s + 2e-6 for gap_s in gaps_s) / len(gaps_s))


def test_only_censored_predictions_give_no_estimate() -> None:
    assert realised([ReturnPrediction(0.5, 4.0, 1.0, False)]) is None


def predictions(reclaimed_share: float, seed: int = 7, turns: int = 3_000) -> EventRecorder:
    """Tools of 1 to 11 s, uniform; each TTL drawn, predicted truly; some pins reclaimed meanwhile."""
    draw = random.Random(seed)
    run, now_s = Run(), 0.0
    for number in range(turns):
        ttl_s, gap_s = draw.uniform(1.5, 10.5), draw.uniform(1, 11)
        keep = Retention(ttl_s, "continuum", "cdf", probability=(ttl_s - 1) / 10)
        run.turn("job", f"t{number}", (now_s, now_s, now_s + 1), keep=keep)
        until_s, outcome = min((gap_s, PinEnd.REUSED), (ttl_s, PinEnd.EXPIRED), key=lambda end: end[0])
        taken_s = draw.uniform(0, 11)
        if draw.random() < reclaimed_share and taken_s < until_s:
            until_s, outcome = taken_s, PinEnd.RECLAIMED
        run.unpinned(now_s + 1 + until_s, "job", outcome)
        now_s += 1 + gap_s
    return run.recorder


@pytest.mark.parametrize("reclaimed_share", [0.0, 0.7])
def test_true_predictions_are_found_true_also_where_pins_are_reclaimed(
    tmp_path: Path, reclaimed_share: float
) -> None:
    bins = calibration(load(written(tmp_path, predictions(reclaimed_share))))
    assert len(bins) == 10
    for found in bins:
        assert found.realised == pytest.approx(found.predicted, abs=0.1)
    assert (sum(found.censored for found in bins) > 500) == bool(reclaimed_share)


def test_a_prediction_whose_ttl_outlasts_the_recording_is_censored_not_refuted(tmp_path: Path) -> None:
    run = Run()
    run.turn("a", "a1", (0, 0, 1), keep=KEEP)  # until 4 s, and the recording ends at 2 s
    run.turn("b", "b1", (0, 0, 2))
    (found,) = calibration(load(written(tmp_path, run.recorder)))
    assert (found.predictions, found.censored, found.realised) == (1, 1, None)


def test_a_program_that_ended_within_its_ttl_is_censored_not_late(tmp_path: Path) -> None:
    run = Run()
    run.turn("a", "a1", (0, 0, 1), keep=KEEP)
    run.recorder.record(ProgramEnded(2, ProgramId("a"), 1))
    run.turn("b", "b1", (0, 0, 9))
    (found,) = calibration(load(written(tmp_path, run.recorder)))
    assert (found.predictions, found.censored, found.realised) == (1, 1, None)


def test_a_prediction_without_a_return_within_its_ttl_is_refuted(tmp_path: Path) -> None:
    run = Run()
    run.turn("a", "a1", (0, 0, 1), keep=KEEP)
    run.turn("b", "b1", (0, 0, 9))
    (found,) = calibration(load(written(tmp_path, run.recorder)))
    assert (found.predictions, found.censored, found.realised) == (1, 0, 0)
