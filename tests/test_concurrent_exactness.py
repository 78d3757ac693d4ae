"""vLLM's Python interface over GPU, DRAM and disk: programs that are evicted, preempted and loaded again are
token for token right.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import BLOCK, ids
from waiting import until_stored

from experiments.exactness import (
    CPU,
    LMCACHE,
    SETTINGS,
    WAYS,
    below,
    engine,
    off_by,
    play_all_ways,
    reference,
    sources,
)
from experiments.forking_vllm import fork_from_now_on

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def llm(model: Path, disk: Path) -> Iterator[Any]:  # noqa: ARG001
    with pytest.MonkeyPatch.context() as env:
        for name, value in (SETTINGS | dict(CPU.env)).items():
            env.setenv(name, value)
        env.setenv("CONTINUUM_RUN_OUTPUT_DIR", str(disk / "run"))
        fork_from_now_on(env.setattr)
        made = engine(below(LMCACHE, disk, "float32"))
        yield made
        made.llm_engine.engine_core.shutdown()


def test_every_token_is_what_the_model_says_without_a_cache(llm: Any) -> None:
    ways = WAYS[LMCACHE]
    conversations, model = play_all_ways(llm, 8, ways), reference()
    found = sources(llm)
    assert min(found[way] for way in ways) > 0, f"a way was not met: {found}"
    off = [delta for conversation in conversations for delta in off_by(conversation, model)]
    assert len(off) % ((8 * 3 + 3) * 40) == 0  # three of the prompts were asked again
    assert max(off) < 1e-3
    until_stored(llm)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    assert not scheduler._engine.pins.pinned and scheduler.get_kv_cache_usage() == 0.0


def test_a_program_in_llm_generate_is_pinned_reused_and_freed(llm: Any) -> None:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    found_tokens = scheduler._parts.residency.prompt_tokens

    def turn(prompt: list[int], **fields: Any) -> list[int]:
        params = SamplingParams(
            temperature=0, max_tokens=4, ignore_eos=True, extra_args={"job_id": "p", **fields}
        )
        answer = llm.generate(TokensPrompt(prompt_token_ids=prompt), params, use_tqdm=False)[0]
        return prompt + list(answer.outputs[0].token_ids)

    first, before = turn(ids(5 * BLOCK)), found_tokens["gpu"]
    assert scheduler._engine.pins.pinned_blocks == 5
    turn(first + ids(7, 1), is_last_step=True)
    assert found_tokens["gpu"] - before == 5 * BLOCK
    until_stored(llm)
    assert scheduler.get_kv_cache_usage() == 0.0
