"""Costs that follow the loads, and the chance that a tier still holds a prefix."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from continuum_lmcache.config import ContinuumConfig
from continuum_lmcache.reload.cost_model import UNMEASURED, CostModel, PrefillCurve, TransferRate
from continuum_lmcache.reload.rate_calibration import CalibratedCosts, TierSurvival
from continuum_lmcache.reload.tier_store import KVTransfer
from continuum_lmcache.retention.policies import POLICIES
from continuum_lmcache.tools.durations import ToolDurations
from continuum_lmcache.types import EngineLoad, FinishedTurn, ProgramId, Residency, Tier

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
    st.sampled_from(["load", "store"]),
    st.integers(-1, 10**6),
    st.integers(-1, 10**12),
    st.floats(allow_nan=True, allow_infinity=True),
)


def load(seconds, tier=Tier.DRAM, size_bytes=SIZE_BYTES, direction="load"):
    return KVTransfer(tier, direction, size_bytes // 1000, size_bytes, seconds)


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


@pytest.mark.parametrize("times", [10.0, 0.1])
def test_fifty_loads_at_another_rate_bring_the_rate_there(times):
    found = after(*[load(times)] * 50).costs.dram.bytes_per_s
    assert found == pytest.approx(1e6 / times, rel=0.02)


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


def test_stores_change_no_rate_of_loads():
    found = after(load(99.0, direction="store")).costs
    assert (found.dram, found.ssd, found.prefill) == (PROFILE.dram, PROFILE.ssd, PROFILE.prefill)


def test_a_store_that_a_step_waited_for_is_a_stall_and_one_beside_it_is_not():
    """2 s for 1 MB, three times; the disk's own writes and asynchronous stores delay no step."""
    stall = load(2.0, direction="store")
    rates = after(*[stall] * 3, replace(stall, in_step=False), load(9.0, Tier.SSD, direction="store"))
    assert rates.costs.store.seconds(SIZE_BYTES) == pytest.approx(2.0)
    assert rates.samples == {"prefill": 30, "dram": 20, "ssd": 10, "store": 3}
    assert PROFILE.store.seconds(SIZE_BYTES) == 0.0


def test_what_must_be_computed_again_is_stored_again_and_a_pin_saves_that_too():
    """1,000 tokens of 1,000 bytes: 10 s to compute, and 2 s in which a step waits for their store."""
    costs = after(*[load(2.0, direction="store")] * 3).costs
    assert costs.reload_s(Residency(0, 0, 0, 1000)) == pytest.approx(10.0 + 2.0)
    assert costs.reload_s(Residency(0, 1000, 0, 1000)) == pytest.approx(1.0)


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


def test_guesses_and_measurements_are_distinguished_by_their_samples():
    costs = after(load(1.0), costs=UNMEASURED).costs
    assert (costs.dram.samples, costs.ssd.samples, costs.measured) == (1, 0, False)


def ttl_s(costs):
    """What continuum answers for 1000 tokens in DRAM, after a tool whose gaps are 0.02 to 1.10 s."""
    gaps, tool = ToolDurations(), ("make", "bash")
    for i in range(110):
        gaps.observe(tool, 0.02 + 0.01 * i * i / 110)
    turn = FinishedTurn(ProgramId("p"), 3, tool, 1000, 10, Residency(0, 1000, 0, 1000))
    idle = EngineLoad(100, free_blocks=50, pinned_blocks=0, reload_s=costs.reload_s(turn.residency))
    return POLICIES["continuum"].retain(turn, gaps, costs, idle, ContinuumConfig()).ttl_s


def test_a_slower_dram_makes_the_ttl_longer_and_a_faster_one_shorter_within_fifty_loads():
    before_s = ttl_s(PROFILE)
    assert ttl_s(after(*[load(10.0)] * 50).costs) > before_s > ttl_s(after(*[load(0.1)] * 50).costs)


def store(tokens):
    return KVTransfer(Tier.DRAM, "store", tokens, tokens * 1000, 0.01)


def filled(tokens_per_s, for_s=600, capacity=None, step_s=1):
    survival = TierSurvival(capacity or {Tier.DRAM: 100_000, Tier.SSD: 1_000_000})
    for now_s in range(0, for_s, step_s):
        survival.observe(store(int(tokens_per_s * step_s)), float(now_s))
    return survival


def test_a_prefix_survives_a_short_gap_and_not_a_long_one():
    """1000 tokens a second into 100,000: a prefix of 20,000 has 80 s."""
    survival = filled(1000)
    assert survival.chances(20_000, 40.0, 600.0)[Tier.DRAM] > 0.99
    assert survival.chances(20_000, 80.0, 600.0)[Tier.DRAM] == pytest.approx(0.5, abs=0.1)
    assert survival.chances(20_000, 160.0, 600.0)[Tier.DRAM] < 0.01
    assert survival.chances(20_000, 160.0, 600.0)[Tier.SSD] > 0.99


def test_nothing_is_lost_while_nothing_comes_in():
    survival = TierSurvival({Tier.DRAM: 1000})
    assert survival.chances(1000, 1e9, 5.0) == {Tier.DRAM: 1.0}


def test_a_prefix_that_a_tier_cannot_hold_is_not_there():
    assert TierSurvival({Tier.DRAM: 1000}).chances(1001, 0.0, 0.0) == {Tier.DRAM: 0.0}


def test_a_quiet_hour_is_noticed():
    """A rate of 1,000 tokens a second that ended an hour ago has no weight any more."""
    survival = filled(1000)
    assert survival.chances(20_000, 160.0, 600.0)[Tier.DRAM] < 0.01
    assert survival.chances(20_000, 160.0, 4200.0)[Tier.DRAM] > 0.99


def test_a_burst_at_the_start_is_no_rate():
    """Two stores at once: 10,000 tokens in 30 s at most, so 80 s of grace and more."""
    survival = TierSurvival({Tier.DRAM: 100_000})
    for _ in range(2):
        survival.observe(store(5000), 0.0)
    assert survival.chances(20_000, 60.0, 0.0)[Tier.DRAM] > 0.99


def test_promotions_from_disk_fill_dram_and_dram_hits_fill_nothing():
    survival = TierSurvival({Tier.DRAM: 1000, Tier.SSD: 1000})
    survival.observe(KVTransfer(Tier.SSD, "load", 100, 1, 1.0), 0.0)
    survival.observe(KVTransfer(Tier.DRAM, "load", 100, 1, 1.0), 0.0)
    survival.observe(KVTransfer(Tier.SSD, "store", 100, 1, 1.0), 0.0)
    assert {tier: fill.n for tier, fill in survival.fills.items()} == {Tier.DRAM: 1, Tier.SSD: 0}


def test_a_tier_may_go_and_another_one_come():
    """LMCache's server was started again with other tiers."""
    survival = TierSurvival({Tier.DRAM: 1000, Tier.SSD: 1000})
    survival.observe(store(100), 0.0)
    assert not survival.resize({Tier.DRAM: 1000, Tier.SSD: 1000}) and survival.resize({Tier.DRAM: 500})
    survival.observe(store(100), 1.0)
    assert list(survival.chances(10, 1.0, 2.0)) == [Tier.DRAM] and survival.fills[Tier.DRAM].n == 2
    assert survival.resize({Tier.DRAM: 500, Tier.SSD: 4000})
    assert survival.chances(10, 1.0, 2.0)[Tier.SSD] == 1.0


TIMES = st.floats(0, 1e6)


@given(st.lists(st.tuples(LOADS, TIMES)), st.integers(0, 10**7), TIMES, TIMES)
def test_a_chance_is_one_and_falls_with_time(told, prefix_tokens, after_s, more_s):
    survival = TierSurvival({Tier.DRAM: 10**5, Tier.SSD: 10**6})
    for moved, now_s in told:
        survival.observe(moved, now_s)
    sooner = survival.chances(prefix_tokens, after_s, 1e6)
    later = survival.chances(prefix_tokens, after_s + more_s, 1e6)
    for tier in sooner:
        assert 0 <= later[tier] <= sooner[tier] + 1e-9 <= 1 + 2e-9


def test_costs_take_the_chances_as_they_are():
    where = Residency(0, 1000, 0, 1000)
    survival = filled(1000)
    weighed_s = PROFILE.reload_s(where, survival.chances(1000, 300.0, 600.0))
    assert weighed_s == pytest.approx(replace(PROFILE).prefill_s(1000), rel=0.01)
    assert PROFILE.reload_s(where) == pytest.approx(1.0)
