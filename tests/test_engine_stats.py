"""T and eta, from an engine's observations."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from continuum_lmcache.retention.engine_stats import PROGRAM_WINDOW, QUEUE_WINDOW, EvictionStats


def after(*turn_counts):
    history = EvictionStats()
    for turns in turn_counts:
        history.observe_program(turns)
    return history


def by_numpy(turn_counts):
    pairs = [(k, n - k) for n in turn_counts for k in range(1, n + 1)]
    return -np.corrcoef(np.array(pairs).T)[0, 1]


def test_t_is_the_mean_delay_of_evicted_turns_and_0_before_the_first():
    history = EvictionStats()
    assert history.queue_delay_s == 0.0
    history.observe_queue_delay(2.0, evicted=True)
    history.observe_queue_delay(99.0, evicted=False)
    history.observe_queue_delay(4.0, evicted=True)
    assert history.queue_delay_s == 3.0


def test_t_forgets_what_is_older_than_its_window():
    history = EvictionStats()
    for delay_s in [50.0] * QUEUE_WINDOW + [1.0] * QUEUE_WINDOW:
        history.observe_queue_delay(delay_s, evicted=True)
    assert history.queue_delay_s == 1.0


def test_a_delay_that_cannot_be_does_not_count():
    history = EvictionStats()
    for delay_s in (2.0, -1.0, math.nan, math.inf):
        history.observe_queue_delay(delay_s, evicted=True)
    assert history.queue_delay_s == 2.0


def test_eta_is_1_until_two_different_lengths_were_seen():
    assert after().eta == 1.0
    assert after(7, 7, 7).eta == 1.0
    assert after(7, 7, 8).eta < 1.0


def test_eta_of_two_programs_by_hand():
    """Lengths 1 and 3 give the pairs (1, 0), (1, 2), (2, 1), (3, 0).

    Means 7/4 and 3/4. Sum of products of deviations: -3/4*-3/4 + -3/4*5/4 + 1/4*1/4 + 5/4*-3/4
    = -20/16. Of squares: 44/16 and 44/16. Correlation -20/44, so eta = 5/11.
    """
    assert after(1, 3).eta == pytest.approx(5 / 11)


@given(st.lists(st.integers(1, 60), min_size=2, max_size=40).filter(lambda counts: len(set(counts)) > 1))
def test_eta_is_minus_the_correlation_of_turns_done_and_turns_left(turn_counts):
    assert after(*turn_counts).eta == pytest.approx(by_numpy(turn_counts), abs=1e-9)


def test_eta_forgets_what_is_older_than_its_window():
    recent = [5, 9] * (PROGRAM_WINDOW // 2)
    assert after(*[300] * 10, *recent).eta == pytest.approx(by_numpy(recent))
    assert after(*[300] * 10, *[5] * PROGRAM_WINDOW).eta == 1.0


def test_a_number_of_turns_that_cannot_be_does_not_count():
    assert after(7, 0, -3, 10**9, 8).eta == after(7, 8).eta
