"""Load or recompute by measured rates, in seconds that are checked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from continuum_lmcache.policy.continuum import to_load
from continuum_lmcache.reload.cost_model import UNMEASURED, CostModel, PrefillCurve, TransferRate
from continuum_lmcache.reload.load_policy import (
    LoadChoice,
    LoadPolicy,
    LoadReason,
    LoadState,
    residency_of_offer,
)
from continuum_lmcache.reload.rate_calibration import CalibratedCosts
from continuum_lmcache.reload.tier_store import KVTransfer, TierHit
from continuum_lmcache.types import Residency, Tier, TurnId

COSTS = CostModel(  # a token: 1 ms to compute, 0.1 ms from DRAM, 0.2 ms more from the disk
    prefill=PrefillCurve(fixed_s=0.0, per_token_s=1e-3, per_pair_s=0.0, samples=10),
    dram=TransferRate(bytes_per_s=10_000.0, fixed_s=0.0, samples=10),
    ssd=TransferRate(bytes_per_s=5_000.0, fixed_s=0.0, samples=10),
    kv_bytes_per_token=1,
    chunk_tokens=10,
)
BOTH = Residency(gpu_tokens=100, dram_tokens=400, ssd_tokens=300, total_tokens=1000)
ON_DISK = Residency(0, 0, 1000, 1000)
TURN = TurnId("t")


def at(gbps_of_ssd: float = 5_000.0, gbps_of_dram: float = 10_000.0) -> CostModel:
    return replace(
        COSTS,
        dram=replace(COSTS.dram, bytes_per_s=gbps_of_dram),
        ssd=replace(COSTS.ssd, bytes_per_s=gbps_of_ssd),
    )


@pytest.mark.parametrize(
    ("costs", "decision", "tokens"),
    [
        (at(), LoadReason.LOAD, 700),
        (at(gbps_of_ssd=900.0), LoadReason.PARTIAL, 400),  # 1.1 ms and the copy: dearer than 1 ms
        (at(gbps_of_dram=900.0), LoadReason.RECOMPUTE, 0),  # the disk's tokens come through DRAM
    ],
)
def test_each_tier_is_loaded_as_long_as_it_beats_computing(costs, decision, tokens):
    found = choose_load(costs, BOTH)
    assert (found.decision, found.tokens) == (decision, tokens)


def choose_load(costs: CostModel, where: Residency, others: int = 0, kv_tokens: int = 1) -> LoadChoice:
    """Without trials."""
    return to_load(where, LoadState(costs, others, kv_tokens, 0.0))


def asking(costs: CostModel | CalibratedCosts, others=lambda: (0, 1)) -> LoadPolicy:
    rates = costs if isinstance(costs, CalibratedCosts) else CalibratedCosts(costs)
    return LoadPolicy(rates, to_load, others)


ROOMY = 10**9  # tokens: no context takes a share worth speaking of


def test_a_slow_load_is_taken_when_others_would_wait_for_the_prefill():
    """This disk and the copy take 10.1 s, computing 1 s: for this turn, and for each other one."""
    costs = at(gbps_of_ssd=100.0)
    decisions = [choose_load(costs, ON_DISK, n, ROOMY).decision for n in (0, 9, 10)]
    assert decisions == [LoadReason.RECOMPUTE, LoadReason.RECOMPUTE, LoadReason.LOAD]


def test_a_load_that_holds_the_memory_that_others_wait_for_is_not():
    """A tenth of the cache for 10.1 s instead of 1 s: 0.91 s of each other turn, for 1 s of prefill saved.

    So each gains 0.09 s by the load, and 102 of them what this turn loses by it.
    """
    costs = at(gbps_of_ssd=100.0)
    decisions = [choose_load(costs, ON_DISK, n, 10_000).decision for n in (10, 101, 102)]
    assert decisions == [LoadReason.RECOMPUTE, LoadReason.RECOMPUTE, LoadReason.LOAD]
    assert choose_load(costs, ON_DISK, 1000, 9_000).decision is LoadReason.RECOMPUTE


def test_a_disk_that_is_too_slow_even_so_leaves_the_dram_stretch_to_be_loaded():
    """Of BOTH: 0.04 s from DRAM, 0.5 s to compute the rest, or 0.2 s after 30.03 s of this disk."""
    found = choose_load(at(gbps_of_ssd=10.0), BOTH, 20, ROOMY)
    assert (found.decision, found.tokens) == (LoadReason.PARTIAL, 400)
    assert found.chosen_s == pytest.approx(0.04 + 21 * 0.5, rel=1e-4)
    assert found.excess_s == pytest.approx(0.07 + 30.0 + 21 * 0.2 - found.chosen_s, rel=1e-4)


@given(st.integers(0, 50), st.floats(1.0, 1e5), st.floats(1.0, 1e5))
def test_with_memory_to_spare_the_more_turns_wait_the_more_is_loaded(turns, ssd, dram):
    costs = at(ssd, dram)
    few, more = (choose_load(costs, BOTH, n, ROOMY).tokens for n in (turns, turns + 1))
    assert few <= more


def test_the_other_turns_are_counted_again_for_each_load_decision():
    there = iter([(0, ROOMY), (20, ROOMY)])
    policy = asking(at(gbps_of_ssd=100.0), lambda: next(there))
    assert [policy.tokens_to_load(TURN, ON_DISK), policy.tokens_to_load(TURN, ON_DISK)] == [0, 1000]


@pytest.mark.parametrize("unmeasured", ["prefill", "dram", "ssd"])
def test_every_rate_that_a_decision_hangs_on_must_be_measured(unmeasured):
    slow = at(gbps_of_ssd=1.0)
    costs = replace(slow, **{unmeasured: replace(getattr(slow, unmeasured), samples=2)})
    where = Residency(0, 500, 500, 1000)
    assert choose_load(costs, where).decision is LoadReason.UNMEASURED


def test_a_tier_that_holds_nothing_of_the_prompt_need_not_be_measured():
    costs = replace(at(gbps_of_dram=100.0), ssd=UNMEASURED.ssd)
    assert choose_load(costs, Residency(0, 1000, 0, 1000)).decision is LoadReason.RECOMPUTE


TOKENS = st.integers(0, 4000)


@given(TOKENS, TOKENS, TOKENS, TOKENS, st.integers(1, 500))
def test_the_offered_tokens_are_split_without_loss(dram, ssd, gpu, found, rest):
    total = gpu + found + rest
    where = residency_of_offer(TierHit(dram, ssd), gpu, found, total)
    assert where.dram_tokens + where.ssd_tokens == found
    assert min(where.dram_tokens, where.ssd_tokens) >= 0
    assert where.ssd_tokens <= ssd
    assert (where.gpu_tokens, where.recompute_tokens) == (gpu, rest)


def test_what_the_store_has_not_heard_of_yet_came_in_just_now():
    assert residency_of_offer(TierHit(0, 0), 100, 300, 500) == Residency(100, 300, 0, 500)
    assert residency_of_offer(TierHit(200, 100), 100, 200, 500) == Residency(100, 100, 100, 500)


def test_only_what_was_placed_is_counted_and_each_turn_once():
    policy = asking(at(gbps_of_ssd=100.0))
    for _ in range(5):
        assert policy.tokens_to_load(TURN, ON_DISK) == 0  # asked at every step while it waits
    policy.tokens_to_load(TurnId("aborted"), ON_DISK)
    policy.on_turn_end(TurnId("aborted"))
    policy.on_allocated(TURN)
    policy.on_allocated(TURN)
    policy.on_allocated(TurnId("never asked"))
    assert policy.counts == {"recompute": 1}


def declined(policy: LoadPolicy, turns: int) -> float:
    """Seconds lost to trials over this many turns on a disk that takes 10.1 s where computing takes 1 s."""
    lost_s = 0.0
    for _ in range(turns):
        if policy.tokens_to_load(TURN, ON_DISK):
            lost_s += 9.1
        policy.on_allocated(TURN)
    return lost_s


def test_trials_of_a_slow_tier_cost_two_percent_of_what_is_computed_and_no_more():
    policy = asking(at(gbps_of_ssd=100.0))
    lost_s = declined(policy, 2000)
    assert 0 < lost_s <= 0.02 * 2000
    assert policy.counts["trial"] == round(lost_s / 9.1)


def test_a_tier_that_is_fast_again_is_found_out():
    rates = CalibratedCosts(at(gbps_of_ssd=100.0))
    policy = asking(rates)
    for _ in range(4000):
        if policy.tokens_to_load(TURN, ON_DISK):
            rates.observe(KVTransfer(Tier.SSD, 1000, 1000, 0.3))
        policy.on_allocated(TURN)
    assert choose_load(rates.costs, ON_DISK).decision is LoadReason.LOAD
    assert policy.counts["load"] > 2000
