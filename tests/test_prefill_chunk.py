"""The smallest chunk that pays, by measured step times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from continuum_lmcache.admission.prefill_chunk import LARGEST_TOKENS, PrefillChunkTuner, smallest_chunk
from continuum_lmcache.errors import ProfileError
from continuum_lmcache.reload.cost_model import CostModel

SIZES = (0, 128, 256, 512, 2048, 8192)


def steps(c0: float) -> dict[int, float]:
    """A machine that reaches n / (n + c0) of its rate on n tokens, and attends to all n."""
    return {n: 0.004 + max(1e-4 * (n + c0), 0.01) + 2e-9 * n * n if n else 0.014 for n in SIZES}


def test_the_better_a_machine_is_at_small_chunks_the_smaller_a_chunk_pays() -> None:
    chosen = [smallest_chunk(steps(c0)) for c0 in (0, 32, 64, 128, 256)]
    assert chosen == [128, 256, 2048, None, None]


def test_too_few_measurements_give_no_smallest_chunk() -> None:
    assert smallest_chunk({}) is None
    assert smallest_chunk({128: 0.01, 256: 0.02, 512: 0.04}) is None, "no step of decodes alone"
    assert smallest_chunk({0: 0.014, 128: 0.016}) is None, "no slope"


def test_without_measurements_or_without_decodes_the_budget_is_vllms_own() -> None:
    assert PrefillChunkTuner({}, 8192).budget_tokens(100) == 8192
    assert PrefillChunkTuner(steps(0), 8192).budget_tokens(0) == 8192


def test_the_budget_follows_what_prompts_need_beside_the_decodes() -> None:
    chunks = PrefillChunkTuner(steps(0), 8192)
    for _ in range(1000):
        chunks.record(prompt_tokens=300, decode_tokens=10)
    assert chunks.budget_tokens(10) == pytest.approx(310, abs=2)
    assert chunks.budget_tokens(1) == 129, "never below what pays"


def test_prompts_that_pile_up_are_not_starved_by_the_decodes_that_are_left() -> None:
    chunks = PrefillChunkTuner(steps(0), 8192)
    chunks.record(20_000, 100)
    few, piled_up = chunks.budget_tokens(2, running=2), chunks.budget_tokens(2, running=10)
    assert (few, piled_up) == (2 + 400, 2 + 2000)


@given(st.integers(1, 20_000), st.integers(0, 1000), st.integers(0, 9000), st.integers(0, 300))
def test_the_budget_is_never_above_vllms_and_never_starves_prompts(most, decoding, prompts, decodes):
    chunks = PrefillChunkTuner(steps(0), most)
    chunks.record(prompts, decodes)
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
