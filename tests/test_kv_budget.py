"""The KV budget: by hand for models with published numbers, and as properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from continuum_lmcache.capacity import kv_budget
from continuum_lmcache.capacity.kv_budget import GIB
from continuum_lmcache.console.known_models import by_name
from continuum_lmcache.reload.model_shapes import ModelShape

LLAMA = by_name("Llama-3.1-8B")
LATENT = ModelShape("mla", 61, 0, 576, 2, 1.3e12, 163_840, "by hand")  # DeepSeek-V3's shape


def test_a_token_of_llama_8b_takes_128_kib() -> None:
    """32 layers x 8 heads x 128 x K and V x 2 bytes, as profiles/*.yaml have it too."""
    assert LLAMA.bytes_per_token() == 131_072
    assert by_name("Llama-3.1-70B").bytes_per_token() == 327_680
    assert by_name("Qwen2.5-7B").bytes_per_token() == 57_344


def test_ranks_share_heads_until_there_are_more_ranks_than_heads() -> None:
    assert [LLAMA.bytes_per_token(ranks) for ranks in (1, 2, 8, 16)] == [131_072, 65_536, 16_384, 16_384]


def test_every_rank_holds_the_whole_latent() -> None:
    assert LATENT.bytes_per_token(8) == LATENT.bytes_per_token(1) == 61 * 576 * 2


def test_the_budget_of_an_h200_by_hand() -> None:
    """140.4 GiB x 0.92 = 129.17; less 14.96 of weights and 2 of a step: 112.21 GiB, 57,452 blocks of 16."""
    found = kv_budget.of_memory(LLAMA, 143_771 * 2**20, 0.92, 2 * GIB, 16)
    assert found.blocks == 57_452
    assert found.tokens == 919_232
    values = {step.name: step.value for step in found.steps}
    assert values["KV cache"] == pytest.approx(112.21, abs=0.01)
    assert list(values) == [
        "KV of a token",
        "usable memory",
        "weights",
        "a step's needs",
        "KV cache",
        "blocks",
        "tokens",
    ]


def test_weights_that_fill_the_device_leave_no_block() -> None:
    assert kv_budget.of_memory(LATENT, 80 * GIB, 0.9, GIB, 16).blocks == 0


@given(
    kv_bytes=st.integers(0, 10**13), block=st.sampled_from([1, 16, 128]), ranks=st.sampled_from([1, 2, 4, 64])
)
def test_blocks_fill_the_cache_to_within_one(kv_bytes: int, block: int, ranks: int) -> None:
    found = kv_budget.of_bytes(LLAMA, kv_bytes, block, ranks)
    used = found.tokens * found.bytes_per_token
    assert used <= kv_bytes < used + block * found.bytes_per_token
