"""The policy in vLLM's Python interface, with the repository's own lmcache.json, word for word."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forking_vllm import fork_from_now_on
from serving import BLOCK, CHUNK, ids
from waiting import until_stored

from experiments.server import CPU_ENV

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def llm(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An engine in this process, so that tests can read its scheduler."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("llm"))  # the file's disk tier is a relative path
        policy = "experiments.policies:always_loads"
        settings = {"CONTINUUM_POLICY": policy, "CONTINUUM_STATIC_TTL_S": "600"}
        for name, value in {**CPU_ENV, **settings, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}.items():
            patch.setenv(name, value)
        fork_from_now_on(patch.setattr)
        transfer = KVTransferConfig(**json.loads((ROOT / "lmcache.json").read_text()))
        made = LLM(
            str(model),
            scheduling_policy="continuum",
            kv_transfer_config=transfer,
            enforce_eager=True,
            dtype="bfloat16",
            max_model_len=2560,
            num_gpu_blocks_override=24,
            distributed_executor_backend="mp",
        )
        yield made
        made.llm_engine.engine_core.shutdown()


def test_a_program_in_llm_generate_is_pinned_reused_and_freed(llm: Any) -> None:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler

    def turn(prompt: list[int], **fields: Any) -> list[int]:
        params = SamplingParams(
            temperature=0, max_tokens=4, ignore_eos=True, extra_args={"job_id": "p", **fields}
        )
        answer = llm.generate(TokensPrompt(prompt_token_ids=prompt), params, use_tqdm=False)[0]
        return prompt + list(answer.outputs[0].token_ids)

    first = turn(ids(5 * BLOCK))
    assert scheduler._engine.pins.pinned_blocks == 5
    turn(first + ids(7, 1), is_last_step=True)
    assert scheduler._parts.residency.prompt_tokens["gpu"] == 5 * BLOCK
    until_stored(llm)
    assert scheduler.get_kv_cache_usage() == 0.0


def test_a_reload_in_bfloat16_gives_the_logprobs_of_vllms_own_prefix_hit(llm: Any) -> None:
    """Other tests of loads compute in float32 on a CPU without instructions for bfloat16."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    params = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)
    prompt = TokensPrompt(prompt_token_ids=ids(2 * CHUNK + 64, 9))
    tokens_by_tier = llm.llm_engine.engine_core.engine_core.scheduler._parts.residency.prompt_tokens

    def ask() -> list[dict[int, float]]:
        [answer] = llm.generate(prompt, params, use_tqdm=False)
        return [{token: at.logprob for token, at in step.items()} for step in answer.outputs[0].logprobs]

    ask()
    own = ask()
    until_stored(llm)
    assert llm.reset_prefix_cache()
    before = tokens_by_tier["dram"]
    assert ask() == own
    assert tokens_by_tier["dram"] - before == 2 * CHUNK
