"""Real engines that reload KV from the fake connector: the tokens must not change by a bit.

The reference is vLLM's own prefix hit of the same length, since a cold prefill computes the same tail
in other chunks and differs in bfloat16. 6 blocks of 128 and 64 tokens more: the longest hit is three
chunks of 256 for vLLM and for the connector alike.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from forking_vllm import fork_from_now_on
from serving import CHUNK_GIB, DTYPE

from experiments.server import CPU_ENV

pytestmark = pytest.mark.real
HIT_TOKENS = 6 * 128
Tokens = list[tuple[int, float]]  # token id, logprob


class Engine:
    """A small engine whose GPU cache holds one prompt, DRAM two, and the disk all."""

    def __init__(self, model: Path, **fake: Any) -> None:
        from vllm import LLM

        extra = {"fake.dram_gb": 6 * CHUNK_GIB, "fake.ssd_gb": 1.0}
        extra |= {f"fake.{key}": value for key, value in fake.items()}
        connector = {"kv_connector": "FakeConnector", "kv_connector_module_path": "connectors.fake"}
        self.llm = LLM(
            str(model),
            dtype=DTYPE,
            enforce_eager=True,
            max_model_len=1024,
            max_num_seqs=4,
            num_gpu_blocks_override=10,
            seed=0,
            disable_log_stats=False,
            distributed_executor_backend="mp",
            kv_transfer_config={**connector, "kv_role": "kv_both", "kv_connector_extra_config": extra},
        )

    def generate(self, prompt: list[int], tokens: int = 24) -> Tokens:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=tokens, logprobs=1, ignore_eos=True)
        [done] = self.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        out = done.outputs[0]
        assert out.logprobs is not None
        return [(t, at[t].logprob) for t, at in zip(out.token_ids, out.logprobs, strict=True)]

    def loaded_tokens(self) -> int:
        """Tokens that came from the connector so far."""
        name = "vllm:external_prefix_cache_hits"
        return sum(m.value for m in self.llm.get_metrics() if m.name == name)  # type: ignore[attr-defined]


@contextmanager
def an_engine(model: Path, **fake: Any) -> Iterator[Engine]:
    engine = Engine(model, **fake)
    yield engine
    engine.llm.llm_engine.engine_core.shutdown()


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (CPU_ENV | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}).items():
        monkeypatch.setenv(name, value)
    fork_from_now_on(monkeypatch.setattr)


def a_prompt(seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(10, 4000) for _ in range(HIT_TOKENS + 64)]


def test_a_reload_from_dram_or_disk_gives_the_tokens_of_a_prefix_hit(model: Path) -> None:
    prompt = a_prompt(0)
    with an_engine(model) as engine:
        engine.generate(prompt)
        reference = engine.generate(prompt)
        assert engine.loaded_tokens() == 0
        engine.generate(a_prompt(1), tokens=1)  # pushes the prompt off the GPU
        assert engine.generate(prompt) == reference
        from_dram = engine.loaded_tokens()
        for seed in (2, 3):  # ... and out of DRAM
            engine.generate(a_prompt(seed), tokens=1)
        assert engine.generate(prompt) == reference
        assert from_dram >= HIT_TOKENS / 2 and engine.loaded_tokens() - from_dram >= HIT_TOKENS / 2


def test_without_the_copy_the_tokens_differ(model: Path) -> None:
    """The negative control: were this to pass with equal tokens, the test above would prove nothing."""
    prompt = a_prompt(0)
    with an_engine(model, corrupt=True) as engine:
        engine.generate(prompt)
        reference = engine.generate(prompt)
        engine.generate(a_prompt(1), tokens=1)
        corrupted = engine.generate(prompt)
        assert engine.loaded_tokens() >= HIT_TOKENS / 2
    assert [token for token, _ in corrupted] != [token for token, _ in reference]
