"""How small a chunk pays, and whether storing does. Both from measured times."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from continuum_lmcache.admission.prefill_chunk import LARGEST_TOKENS, PrefillChunkTuner, smallest_chunk
from continuum_lmcache.errors import ProfileError
from continuum_lmcache.reload.cost_model import UNMEASURED, CostModel, TransferRate
from continuum_lmcache.reload.store_gate import LEAST_TRANSFERS, TYPICAL_TOKENS, StoreGate, store_token_s

SIZES = (0, 128, 256, 512, 2048, 8192)


def steps(c0: float) -> dict[int, float]:
    """A machine that reaches n / (n + c0) of its rate on n tokens, and attends to all n."""
    return {n: 0.004 + max(1e-4 * (n + c0), 0.01) + 2e-9 * n * n if n else 0.014 for n in SIZES}


def test_the_better_a_machine_is_at_small_chunks_the_smaller_a_chunk_pays() -> None:
    chosen = [smallest_chunk(steps(c0)) for c0 in (0, 32, 64, 128, 256)]
    assert chosen == [128, 256, 2048, None, None]


def test_too_little_measured_says_nothing() -> None:
    assert smallest_chunk({}) is None
    assert smallest_chunk({128: 0.01, 256: 0.02, 512: 0.04}) is None, "no step of decodes alone"
    assert smallest_chunk({0: 0.014, 128: 0.016}) is None, "no slope"


def test_without_measurements_or_without_decodes_the_budget_is_vllms_own() -> None:
    assert PrefillChunkTuner({}, 8192).budget_tokens(100) == 8192
    assert PrefillChunkTuner(steps(0), 8192).budget_tokens(0) == 8192


def test_the_budget_follows_what_prompts_need_beside_the_decodes() -> None:
    chunks = PrefillChunkTuner(steps(0), 8192)
    for _ in range(1000):
        chunks.saw(prompt_tokens=300, decode_tokens=10)
    assert chunks.budget_tokens(10) == pytest.approx(310, abs=2)
    assert chunks.budget_tokens(1) == 129, "never below what pays"


def test_prompts_that_pile_up_are_not_starved_by_the_decodes_that_are_left() -> None:
    chunks = PrefillChunkTuner(steps(0), 8192)
    chunks.saw(20_000, 100)
    few, piled_up = chunks.budget_tokens(2, running=2), chunks.budget_tokens(2, running=10)
    assert (few, piled_up) == (2 + 400, 2 + 2000)


@given(st.integers(1, 20_000), st.integers(0, 1000), st.integers(0, 9000), st.integers(0, 300))
def test_the_budget_is_never_above_vllms_and_never_starves_prompts(most, decoding, prompts, decodes):
    chunks = PrefillChunkTuner(steps(0), most)
    chunks.saw(prompts, decodes)
    budget = chunks.budget_tokens(decoding)
    assert 1 <= budget <= most
    assert budget == most or decoding + 128 <= budget <= decoding + LARGEST_TOKENS


def test_a_profiles_step_times_are_read_and_refused_where_they_are_none() -> None:
    profile = {
        "prefill": {"fixed_s": 0.0, "per_token_s": 1e-4, "per_pair_s": 0.0, "samples": 1},
        "dram": {"bytes_per_s": 1e9, "fixed_s": 0.0, "samples": 1},
        "ssd": {"bytes_per_s": 1e9, "fixed_s": 0.0, "samples": 1},
        "kv_bytes_per_token": 1000,
        "chunk_tokens": 256,
    }
    assert CostModel.from_mapping(profile).step_s == {}
    assert CostModel.from_mapping({**profile, "steps": {0: 0.01, 128: 0.02}}).step_s == {0: 0.01, 128: 0.02}
    for bad in ({"x": 1.0}, {128: -1.0}, [1]):
        with pytest.raises(ProfileError, match="steps"):
            CostModel.from_mapping({**profile, "steps": bad})


# stores -----------------------------------------------------------------------


def test_stores_that_nobody_waits_for_are_never_stopped() -> None:
    stores = StoreGate(stalls=False)
    stores.turn(0.0, 10_000, 0)
    assert stores.wanted(UNMEASURED)


def test_stores_stop_while_nothing_is_lost_and_go_on_when_much_is() -> None:
    stores = StoreGate(stalls=True)
    stores.turn(0.0, 10_000, 0)
    assert not stores.wanted(UNMEASURED)
    stores.turn(1.0, 1_000, 9_000)
    assert stores.wanted(UNMEASURED)
    stores.turn(2000.0, 10_000, 0)
    assert not stores.wanted(UNMEASURED), "what was lost half an hour ago does not count"


@pytest.mark.parametrize(("times", "goes_on"), [(1.1, False), (1.4, True)])
def test_a_store_must_be_repaid_by_more_than_it_costs(times: float, goes_on: bool) -> None:
    costs, new_tokens = UNMEASURED, 10_000
    compute_s = costs.prefill_s(TYPICAL_TOKENS) / TYPICAL_TOKENS
    load_s = costs.dram.seconds(TYPICAL_TOKENS * costs.kv_bytes_per_token) / TYPICAL_TOKENS
    stores = StoreGate(stalls=True)
    stores.turn(0.0, new_tokens, round(times * new_tokens * store_token_s(costs) / (compute_s - load_s)))
    assert stores.wanted(costs) is goes_on


def test_stores_measured_to_cost_next_to_nothing_go_on() -> None:
    stores = StoreGate(stalls=True)
    stores.turn(0.0, 10_000, 0)
    fast, slow = (TransferRate(bytes_per_s, 0.0, LEAST_TRANSFERS) for bytes_per_s in (1e13, 1e9))
    assert stores.wanted(replace(UNMEASURED, store=fast))
    assert not stores.wanted(replace(UNMEASURED, store=slow))
    assert not stores.wanted(replace(UNMEASURED, store=replace(fast, samples=LEAST_TRANSFERS - 1)))
