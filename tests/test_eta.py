"""T and eta, from an engine's observations."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from continuum_lmcache.programs.context_growth import WINDOW, ContextGrowth
from continuum_lmcache.reload.cost_model import UNMEASURED
from continuum_lmcache.retention.learned import QUEUE_WINDOW, Learned
from continuum_lmcache.tools.durations import ToolDurations


def after(*turn_counts):
    growth = ContextGrowth()
    for turns in turn_counts:
        growth.program_ended(turns)
    return growth


def by_numpy(turn_counts):
    pairs = [(k, n - k) for n in turn_counts for k in range(1, n + 1)]
    return -np.corrcoef(np.array(pairs).T)[0, 1]


def test_t_is_the_mean_of_the_latest_delays_and_0_before_the_first():
    learned = Learned(UNMEASURED, ToolDurations(), {})
    assert learned.queue_delay_s == 0.0
    for delay_s in (2.0, 4.0):
        learned.observe_queue_delay(delay_s)
    assert learned.queue_delay_s == 3.0
    for _ in range(QUEUE_WINDOW):
        learned.observe_queue_delay(1.0)
    assert learned.queue_delay_s == 1.0


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
    recent = [5, 9] * (WINDOW // 2)
    assert after(*[300] * 10, *recent).eta == pytest.approx(by_numpy(recent))
    assert after(*[300] * 10, *[5] * WINDOW).eta == 1.0


def test_a_number_of_turns_that_cannot_be_does_not_count():
    assert after(7, 0, -3, 10**9, 8).eta == after(7, 8).eta


def test_a_program_that_goes_on_after_all_does_not_count():
    growth = after(7, 8, 30)
    growth.program_goes_on(30)
    assert growth.eta == after(7, 8).eta
