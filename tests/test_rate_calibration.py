"""Costs that follow the loads, and the chance that a tier still holds a prefix."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from continuum_lmcache.reload.cost_model import UNMEASURED, CostModel, PrefillCurve, TransferRate
from continuum_lmcache.reload.rate_calibration import CalibratedCosts, TierSurvival
from continuum_lmcache.reload.tier_store import KVTransfer
from continuum_lmcache.types import Residency, Tier

PROFILE = CostModel(
    prefill=PrefillCurve(fixed_s=0.0, per_token_s=0.01, per_pair_s=0.0, samples=30),
    dram=TransferRate(bytes_per_s=1e6, fixed_s=0.0, samples=20),
    ssd=TransferRate(bytes_per_s=1e5, fixed_s=0.1, samples=10),
    kv_bytes_per_token=1000,
    chunk_tokens=1,
)
SIZE_BYTES = 1_000_000
LOADS = st.builds(
    KVTransfer,
    st.sampled_from([Tier.DRAM, Tier.SSD, Tier.GPU]),
    st.integers(-1, 10**6),
    st.integers(-1, 10**12),
    st.floats(allow_nan=True, allow_infinity=True),
)


def load(seconds, tier=Tier.DRAM, size_bytes=SIZE_BYTES):
    return KVTransfer(tier, size_bytes // 1000, size_bytes, seconds)


def after(*transfers, costs=PROFILE):
    rates = CalibratedCosts(costs)
    for moved in transfers:
        rates.observe(moved)
    return rates


def test_loads_at_the_profiles_rate_change_nothing_but_its_samples():
    costs = after(*[load(1.0)] * 7).costs
    assert costs.dram == TransferRate(bytes_per_s=pytest.approx(1e6), fixed_s=0.0, samples=27)
    assert costs.ssd == PROFILE.ssd
    assert costs.prefill == PROFILE.prefill


@pytest.mark.parametrize("times", [10.0, 1.5, 0.7])
def test_fifty_loads_at_another_rate_bring_the_rate_there_however_little_it_differs(times):
    found = after(*[load(times)] * 50).costs.dram.bytes_per_s
    assert found == pytest.approx(1e6 / times, rel=0.05)


@pytest.mark.parametrize(("costs", "most"), [(PROFILE, 2.0), (UNMEASURED, 3.17)], ids=["measured", "assumed"])
@pytest.mark.parametrize("seconds", [10.0, 1e9])
def test_one_slow_load_does_not_halve_a_measured_rate_and_moves_a_guess_more(costs, most, seconds):
    assert after(load(seconds), costs=costs).costs.dram.bytes_per_s > costs.dram.bytes_per_s / most
    settled = [load(costs.dram.seconds(SIZE_BYTES))] * 20
    moved = after(*settled, load(seconds), costs=costs).costs.dram.bytes_per_s
    assert moved > costs.dram.bytes_per_s * 0.75


def test_noise_around_the_rate_stays_around_the_rate():
    """Every load takes 2 s or 0.5 s: a geometric mean of 1."""
    assert after(*[load(2.0), load(0.5)] * 50).costs.dram.bytes_per_s == pytest.approx(1e6, rel=0.1)


def test_a_disk_load_is_corrected_for_the_copy_that_costs_add_again():
    """1 MB: 10.1 s to read and 1 s to copy. 41.4 s in all are 40.4 s of reading: a quarter of the rate."""
    costs = after(*[load(41.4, Tier.SSD)] * 60).costs
    assert costs.ssd.bytes_per_s == pytest.approx(25_000, rel=0.01)
    predicted_s = costs.ssd.seconds(SIZE_BYTES) + costs.dram.seconds(SIZE_BYTES)
    assert predicted_s == pytest.approx(41.4, rel=0.01)


def test_a_disk_load_faster_than_the_copy_alone_leaves_a_rate():
    assert 0 < after(*[load(0.5, Tier.SSD)] * 50).costs.ssd.bytes_per_s < math.inf


def test_impossible_transfers_change_no_rate():
    nonsense = [load(seconds) for seconds in (0.0, -1.0, math.nan, math.inf)]
    nonsense += [load(1.0, size_bytes=0), load(1.0, Tier.GPU)]
    rates = after(*nonsense)
    assert rates.costs == PROFILE


@pytest.mark.parametrize("times", [10.0, 0.1])
def test_the_prefill_curve_follows_the_steps(times):
    rates = CalibratedCosts(PROFILE)
    for _ in range(50):
        rates.observe_prefill(took_s=times * 10.0, predicted_s=rates.costs.prefill_s(1000))
    assert rates.costs.prefill_s(1000) == pytest.approx(times * 10.0, rel=0.02)
    assert rates.samples["prefill"] == 30 + 50


@pytest.mark.parametrize("times", [100.0, 0.01])
def test_three_loads_that_agree_on_another_rate_move_it_at_once(times):
    rates = after(*[load(1.0)] * 30, *[load(times)] * 3)
    assert rates.costs.dram.bytes_per_s == pytest.approx(1e6 / times)


@given(st.lists(LOADS, max_size=60))
def test_rates_stay_finite_and_positive_whatever_is_reported(transfers):
    costs = after(*transfers).costs
    for rate in (costs.dram, costs.ssd):
        assert 0 < rate.bytes_per_s < math.inf
        assert 0 <= rate.fixed_s < math.inf


CONTEXT = 1000
IN_BOTH = Residency(0, 600, 400, CONTEXT)  # DRAM has the head, the disk all


def survival(capacity=None):
    return TierSurvival(capacity or {Tier.DRAM: 10_000, Tier.SSD: 100_000})


def test_a_tier_is_trusted_until_a_return_shows_otherwise():
    assert survival().chances() == {Tier.DRAM: 1.0, Tier.SSD: 1.0}


def test_a_tier_that_has_lost_what_the_gpu_lost_is_soon_not_trusted():
    """Three returns: a quarter of the trust is left. The disk has kept all."""
    seen = survival()
    for _ in range(3):
        seen.on_return(IN_BOTH, Residency(0, 0, CONTEXT, CONTEXT), CONTEXT)
    assert seen.chances()[Tier.DRAM] == pytest.approx(0.25, abs=0.02)
    assert seen.chances()[Tier.SSD] == 1.0


def test_only_what_the_gpu_lost_and_the_tier_held_counts():
    """The GPU still has 200 tokens, and the prompt repeats 500 of the 1000: of 300 DRAM still has 150."""
    seen = survival()
    seen.on_return(IN_BOTH, Residency(200, 150, 0, 900), 500)
    assert seen.chances()[Tier.DRAM] == pytest.approx((0.98 + 0.5) / (0.98 + 1.0))


@pytest.mark.parametrize(
    ("left", "found"),
    [
        (Residency(0, 0, 0, CONTEXT), Residency(0, 0, 0, CONTEXT)),  # was in no tier
        (Residency(0, 400, 0, CONTEXT), Residency(500, 0, 0, CONTEXT)),  # the GPU has all of DRAM's part
    ],
)
def test_a_return_that_needs_nothing_of_a_tier_teaches_nothing(left, found):
    seen = survival()
    seen.on_return(left, found, CONTEXT)
    assert seen.chances() == {Tier.DRAM: 1.0, Tier.SSD: 1.0}


def test_trust_comes_back_with_the_returns():
    seen = survival()
    for found in [Residency(0, 0, 0, CONTEXT)] * 20 + [IN_BOTH] * 200:
        seen.on_return(IN_BOTH, found, CONTEXT)
    assert seen.chances()[Tier.DRAM] > 0.9


def test_a_tier_of_another_size_is_another_tier():
    """LMCache's server was started again with other tiers."""
    seen = survival({Tier.DRAM: 1000, Tier.SSD: 1000})
    seen.on_return(IN_BOTH, Residency(0, 0, 0, CONTEXT), CONTEXT)
    seen.resize({Tier.DRAM: 1000, Tier.SSD: 1000})
    assert seen.chances()[Tier.DRAM] < 1.0
    seen.resize({Tier.DRAM: 5000})
    assert seen.chances() == {Tier.DRAM: 1.0}
    seen.on_return(IN_BOTH, Residency(0, 0, 0, CONTEXT), CONTEXT)
    seen.resize({Tier.DRAM: 5000, Tier.SSD: 4000})
    assert seen.chances()[Tier.DRAM] < 1.0 and seen.chances()[Tier.SSD] == 1.0


TOKENS = st.integers(0, 10**6)
RESIDENCIES = st.builds(lambda *parts: Residency(*parts, sum(parts)), TOKENS, TOKENS, TOKENS)


@given(st.lists(st.tuples(RESIDENCIES, RESIDENCIES, TOKENS)))
def test_a_chance_is_a_probability(returns):
    seen = survival()
    for each in returns:
        seen.on_return(*each)
    assert all(0.0 <= chance <= 1.0 for chance in seen.chances().values())
