"""PrefillReload, tier by tier."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from continuum_lmcache.errors import ProfileError
from continuum_lmcache.reload.cost_model import UNMEASURED, CostModel, PrefillCurve, ReloadCost, TransferRate
from continuum_lmcache.types import Residency, Tier

PROFILE = {
    "prefill": {"fixed_s": 0.1, "per_token_s": 0.001, "per_pair_s": 0.0, "samples": 30},
    "dram": {"bytes_per_s": 1000, "fixed_s": 0.5, "samples": 20},
    "ssd": {"bytes_per_s": 100, "fixed_s": 1.0, "samples": 10},
    "kv_bytes_per_token": 1,
    "chunk_tokens": 256,
    "provenance": {"device": "made up"},
}
SLOW_GPU = CostModel(
    prefill=PrefillCurve(fixed_s=0.0, per_token_s=1.0, per_pair_s=0.01, samples=1),
    dram=TransferRate(bytes_per_s=10.0, fixed_s=0.5, samples=1),
    ssd=TransferRate(bytes_per_s=2.0, fixed_s=1.0, samples=1),
    kv_bytes_per_token=1,
    chunk_tokens=10,
)


def cheapest(costs: CostModel, where: Residency) -> ReloadCost:
    return min(costs.load_options(where), key=lambda cost: cost.total_s)


PLACES = st.tuples(*[st.integers(0, 5000)] * 4).map(lambda p: Residency(p[0], p[1], p[2], sum(p)))


def test_prefill_is_quadratic_in_the_tokens_and_linear_in_the_context():
    """10 tokens after 20: 10 * 1 s, and 10 * 20 + 10 * 10 / 2 = 250 pairs of 0.01 s: 12.5 s."""
    assert SLOW_GPU.prefill_s(10, 20) == pytest.approx(12.5)
    assert SLOW_GPU.prefill_s(0, 20) == 0.0


def test_each_stretch_costs_what_its_tier_costs():
    """20 on the GPU, 30 in DRAM, 10 on disk, 4 nowhere.

    DRAM 0.5 + 30/10 = 3.5 s. Disk 1 + 10/2 = 6 s and the copy after it 0.5 + 10/10 = 1.5 s.
    Prefill of 4 after 60: 4 + 0.01 * (240 + 8) = 6.48 s. Computing all of it would take 62.48 s.
    """
    cost = cheapest(SLOW_GPU, Residency(20, 30, 10, 64))
    assert cost.loaded_tokens == 40
    assert (cost.load_s, cost.prefill_s) == pytest.approx((3.5 + 7.5, 6.48))
    assert cost.total_s == pytest.approx(17.48)


def test_loading_stops_at_the_tier_where_computing_is_cheaper():
    """One token on a disk that takes 1 s to start: computing it after 50 takes 1.505 s, loading 2.1 s."""
    cost = cheapest(SLOW_GPU, Residency(20, 30, 1, 51))
    assert (cost.loaded_tokens, cost.load_s) == (30, 3.5)
    assert cost.total_s == pytest.approx(3.5 + 1.505)


def test_what_a_tier_may_lose_is_weighed_by_its_chance():
    """30 in DRAM, kept with 3/4: 3/4 * 3.5 s, and 1/4 of computing 30 tokens, 30 + 0.01 * 450 = 34.5 s."""
    where = Residency(0, 30, 0, 30)
    assert SLOW_GPU.reload_s(where, {Tier.DRAM: 0.75}) == pytest.approx(0.75 * 3.5 + 0.25 * 34.5)


def test_what_dram_loses_is_read_from_the_disk_behind_it():
    """40 tokens from the disk: 1 + 40/2 = 21 s and the copy 0.5 + 40/10 = 4.5 s; computing them 56 s."""
    for where in (Residency(20, 30, 10, 60), Residency(20, 40, 0, 60)):
        lost = SLOW_GPU.reload_s(where, {Tier.DRAM: 0.0, Tier.SSD: 1.0})
        assert lost == pytest.approx(21.0 + 4.5)


def test_what_no_tier_keeps_is_computed():
    """40 after 20: 40 + 0.01 * (800 + 800) = 56 s; half the time it is still on the disk."""
    where = Residency(20, 30, 10, 60)
    assert SLOW_GPU.reload_s(where, {Tier.DRAM: 0.0, Tier.SSD: 0.0}) == pytest.approx(56.0)
    assert SLOW_GPU.reload_s(where, {Tier.DRAM: 0.0, Tier.SSD: 0.5}) == pytest.approx((56.0 + 25.5) / 2)
    in_dram = Residency(20, 40, 0, 60)
    assert SLOW_GPU.reload_s(in_dram, {Tier.DRAM: 0.0}) == pytest.approx(56.0), "there is no disk"


def test_a_disk_that_loses_its_copy_of_what_is_in_dram_costs_nothing():
    where = Residency(0, 30, 0, 40)
    assert SLOW_GPU.reload_s(where, {Tier.SSD: 0.0, Tier.DRAM: 1.0}) == SLOW_GPU.reload_s(where)


@given(PLACES, st.floats(0, 1), st.floats(0, 1))
def test_a_reload_costs_at_most_what_computing_everything_costs(where, dram, ssd):
    for costs in (SLOW_GPU, UNMEASURED):
        below_tokens = where.total_tokens - where.gpu_tokens
        assert 0.0 <= costs.reload_s(where) <= costs.prefill_s(below_tokens, where.gpu_tokens)
        weighed_s = costs.reload_s(where, {Tier.DRAM: dram, Tier.SSD: ssd})
        everything_s = costs.prefill_s(where.total_tokens) + 2 * costs.prefill.fixed_s
        assert costs.reload_s(where) * (1 - 1e-9) <= weighed_s <= everything_s * (1 + 1e-9)


@given(PLACES, st.floats(1.0, 100.0))
def test_a_slower_tier_never_makes_a_reload_cheaper(where, times):
    slower = replace(SLOW_GPU, dram=replace(SLOW_GPU.dram, bytes_per_s=SLOW_GPU.dram.bytes_per_s / times))
    assert slower.reload_s(where) >= SLOW_GPU.reload_s(where)


def test_a_profile_becomes_costs():
    costs = CostModel.from_mapping(PROFILE)
    assert costs.dram == TransferRate(bytes_per_s=1000, fixed_s=0.5, samples=20)
    assert costs.prefill_s(1000) == pytest.approx(1.1)
    assert costs.measured


def test_costs_with_an_unmeasured_part_count_as_not_measured():
    assert not UNMEASURED.measured
    assert not CostModel.from_mapping(PROFILE | {"ssd": PROFILE["ssd"] | {"samples": 0}}).measured


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dram": None}, "no section 'dram'; measure it"),
        ({"nvme": {}}, "unknown key 'nvme'"),
        ({"ssd": PROFILE["ssd"] | {"gbps": 3}}, "h200.yaml, ssd: unknown key 'gbps'"),
        ({"ssd": PROFILE["ssd"] | {"bytes_per_s": "3e9"}}, "h200.yaml, ssd: bytes_per_s is '3e9'"),
        ({"ssd": PROFILE["ssd"] | {"bytes_per_s": 0}}, "bytes_per_s is 0"),
        ({"dram": PROFILE["dram"] | {"fixed_s": -1}}, "h200.yaml, dram: fixed_s is -1"),
        ({"dram": PROFILE["dram"] | {"fixed_s": float("nan")}}, "fixed_s is nan"),
        ({"chunk_tokens": 0}, "chunk_tokens is 0; it must be a finite number >= 1"),
        ({"kv_bytes_per_token": True}, "kv_bytes_per_token is True"),
    ],
)
def test_an_impossible_profile_is_refused_by_name_and_place(changes, says):
    with pytest.raises(ProfileError, match=says):
        CostModel.from_mapping(PROFILE | changes, "h200.yaml")


@pytest.mark.parametrize("given_profile", [None, [], "text"])
def test_a_profile_that_is_no_mapping_is_refused(given_profile):
    with pytest.raises(ProfileError, match="must be a mapping"):
        CostModel.from_mapping(given_profile)
