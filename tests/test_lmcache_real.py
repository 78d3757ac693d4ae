"""LMCache under a real vLLM engine on this machine's CPU: loaded KV equals stored KV.

The oracle is vLLM's own prefix hit of the same length: bfloat16 gives another prompt split other
logits, so prompts are 256 * n + 64 tokens, of which vLLM and LMCache both hit 256 * n.
"""

from __future__ import annotations

import copy
import random
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("lmcache")

from forking_vllm import fork_from_now_on
from prometheus_client import REGISTRY
from serving import CHUNK, CHUNK_GIB, DTYPE, KV_BYTES
from waiting import PATIENCE_S, wait_for

from connectors.lmcache.connector import ContinuumLMCacheConnector
from connectors.lmcache.copies.on_cpu import BlockCopier
from continuum_lmcache.errors import ConfigError
from continuum_lmcache.reload.tier_store import TierHit
from experiments.server import CPU_ENV
from experiments.tiny_model import make_model

pytestmark = pytest.mark.real
REPO = Path(__file__).parent.parent
DRAM_CHUNKS = 9
BLOCKS = 40  # of 128 tokens


class BreakableCopier(BlockCopier):
    """The copier under test; while the flag file exists it loads nothing: the negative control."""

    flag: Path

    def batched_to_gpu(self, *args, **kwargs):
        if not self.flag.exists():
            super().batched_to_gpu(*args, **kwargs)


class BreakableConnector(ContinuumLMCacheConnector):
    copier = BreakableCopier

    def __init__(self, vllm_config, role, kv_cache_config):
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        BreakableCopier.flag = Path(extra["lmcache.local_disk"].removeprefix("file://")) / "broken"
        super().__init__(vllm_config, role, kv_cache_config)


class Engine:
    """A vLLM engine, its scheduler in this process and its worker in another."""

    def __init__(self, disk: Path) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self.disk = disk
        extra = {
            "lmcache.max_local_cpu_size": DRAM_CHUNKS * CHUNK_GIB,
            "lmcache.local_disk": f"file://{disk}/",
            "lmcache.max_local_disk_size": 1,
            "lmcache.lookup_timeout_ms": int(PATIENCE_S * 1000),  # after its default, 3 s, nothing is found
        }
        self.llm = LLM(
            str(make_model(REPO / ".work" / "tiny-model")),
            enforce_eager=True,
            dtype=DTYPE,
            max_model_len=4096,
            max_num_batched_tokens=2048,  # so that a prompt larger than the DRAM pool is stored in two steps
            num_gpu_blocks_override=BLOCKS,
            seed=0,
            disable_log_stats=False,
            distributed_executor_backend="mp",
            kv_transfer_config=KVTransferConfig(
                kv_connector=BreakableConnector.__name__,
                kv_connector_module_path=__name__,
                kv_role="kv_both",
                kv_connector_extra_config=extra,
            ),
        )
        self.connector = self.llm.llm_engine.engine_core.engine_core.scheduler.connector

    def run(self, *prompts):
        """Per prompt: (tokens reused, [(token, {candidate: logprob})...])."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=8, logprobs=3, ignore_eos=True)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [answer(out) for out in self.llm.generate(inputs, params, use_tqdm=False)]

    def forget_gpu(self) -> None:
        self.llm.reset_prefix_cache()

    def located(self, prompt) -> TierHit:
        """The tiers' content after the writes to disk have ended."""

        def is_current() -> bool:
            self.connector.locate(prompt)
            return not self.connector.tiers._mirror.is_behind

        wait_for(is_current, every_s=0.02)
        return self.connector.locate(prompt)

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


def answer(output):
    steps = [{token: at.logprob for token, at in step.items()} for step in output.outputs[0].logprobs]
    return output.num_cached_tokens, list(zip(output.outputs[0].token_ids, steps, strict=True))


def prompt(seed: int, chunks: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 4096) for _ in range(chunks * CHUNK + 64)]


def counted(name: str, **labels: str) -> float:
    """A Prometheus counter's value."""
    return sum(
        sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    settings = {
        **CPU_ENV,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # a test looks into the worker
    }
    with pytest.MonkeyPatch.context() as env:
        for name, value in settings.items():
            env.setenv(name, value)
        env.delenv("PYTHONHASHSEED", raising=False)  # LMCache's own default then never hits
        fork_from_now_on(env.setattr)
        made = Engine(tmp_path_factory.mktemp("disk"))
        yield made
        made.close()


def test_a_reload_from_dram_gives_the_same_logprobs_as_vllms_own_prefix_hit(engine):
    p = prompt(1, 3)
    cold, own = engine.run(p)[0], engine.run(p)[0]
    assert (cold[0], own[0]) == (0, 3 * CHUNK)
    engine.forget_gpu()
    assert engine.connector.locate(p) == TierHit(3 * CHUNK, 0)
    before = counted("continuum_loaded_tokens_total", tier="dram")
    assert engine.run(p)[0] == own
    assert counted("continuum_loaded_tokens_total", tier="dram") - before == 3 * CHUNK
    assert counted("continuum_load_seconds_total", tier="dram") > 0
    assert counted("continuum_stored_bytes_total") >= 3 * CHUNK * KV_BYTES


def test_the_policies_and_vllm_know_alike_whether_steps_wait_for_loads(engine, monkeypatch):
    """Whether steps wait for them."""
    stock, replies = engine.connector.get_num_new_matched_tokens, []
    spy = lambda *args: replies.append(stock(*args)) or replies[-1]  # noqa: E731
    monkeypatch.setattr(engine.connector, "get_num_new_matched_tokens", spy)
    p = prompt(5, 2)
    engine.run(p)
    engine.forget_gpu()
    engine.run(p)
    assert replies[-1] == (2 * CHUNK, engine.connector.async_loads) == (2 * CHUNK, False)


def test_four_programs_at_once_reload_exactly_from_dram_and_then_from_disk(engine):
    prompts = [prompt(10 + i, 2) for i in range(4)]
    engine.run(*prompts)
    own = engine.run(*prompts)
    assert [reused for reused, _ in own] == [2 * CHUNK] * 4
    engine.forget_gpu()
    assert {engine.located(p) for p in prompts} == {TierHit(2 * CHUNK, 0)}
    reload_from("dram", "host", engine, prompts, own)
    engine.run(prompt(99, DRAM_CHUNKS))  # takes all of DRAM
    engine.forget_gpu()
    assert {engine.located(p) for p in prompts} == {TierHit(0, 2 * CHUNK)}
    reload_from("ssd", "disk", engine, prompts, own)


def reload_from(tier, source, engine, prompts, own):
    """The tokens are right, and counted by tier in our metric and vLLM's; the scheduler hears the times."""
    ours, vllms = "continuum_loaded_tokens_total", "vllm:prompt_tokens_cached_by_source_total"
    before = counted(ours, tier=tier), counted(vllms, source=source)
    engine.connector.transfers()
    assert engine.run(*prompts) == own
    tokens = len(prompts) * 2 * CHUNK
    assert counted(ours, tier=tier) - before[0] == tokens
    assert counted(vllms, source=source) - before[1] >= tokens
    loads = [t for t in engine.connector.transfers() if t.direction == "load"]
    assert {load.tier.value for load in loads} == {tier}
    for load in loads:
        assert load.size_bytes == load.tokens * KV_BYTES and 0 < load.duration_s < PATIENCE_S


def test_a_prefix_larger_than_the_dram_pool_is_loaded_in_part_and_does_not_hang(engine):
    p = prompt(2, DRAM_CHUNKS + 2)

    def is_held() -> bool:
        """A chunk is not stored while DRAM is full of chunks that the disk has not written yet."""
        engine.run(p)
        engine.forget_gpu()
        held = engine.located(p)
        return held.dram_tokens + held.ssd_tokens == (DRAM_CHUNKS + 2) * CHUNK

    wait_for(is_held)
    (reused, steps), *_ = engine.run(p)
    assert reused == int(DRAM_CHUNKS * 7 / 8) * CHUNK and len(steps) == 8


def test_a_capped_load_that_begins_inside_a_chunk_does_not_kill_the_engine(engine):
    p = prompt(2, DRAM_CHUNKS + 2)
    engine.forget_gpu()
    engine.run(p[: CHUNK + 128 + 64])  # vLLM then holds one block more than a chunk
    (reused, steps), *_ = engine.run(p)
    assert reused > CHUNK and len(steps) == 8


@pytest.mark.parametrize(("chunks", "lost"), [(1, 1), (3, 1), (3, 3)])
def test_chunk_files_that_are_gone_are_computed_again(engine, chunks, lost):
    p = prompt(40 + 10 * chunks + lost, chunks)
    before = set(engine.disk.glob("*.pt"))
    cold = engine.run(p)[0]
    engine.located(p)
    written = sorted(set(engine.disk.glob("*.pt")) - before, key=lambda path: path.stat().st_mtime_ns)
    engine.run(prompt(98, DRAM_CHUNKS))
    engine.forget_gpu()
    assert engine.located(p) == TierHit(0, chunks * CHUNK)
    for path in written[:lost]:
        path.unlink()
    (_, steps), *_ = engine.run(p)
    assert len(steps) == 8
    if lost == chunks:
        assert steps == cold[1]  # all of it was computed, in one piece as before


def with_extra(engine: Engine, **extra):
    """The engine's own vLLM configuration with other keys in the connector's extra config."""
    config = copy.copy(engine.llm.llm_engine.vllm_config)
    config.kv_transfer_config = copy.copy(config.kv_transfer_config)
    config.kv_transfer_config.kv_connector_extra_config = extra
    return config


def test_the_front_end_refuses_a_wrong_setting_in_one_line_before_an_engine_starts(engine):
    ContinuumLMCacheConnector.check_settings(with_extra(engine, **{"lmcache.chunk_size": 512}))
    with pytest.raises(ConfigError, match=r"^[^\n]*did you mean lmcache.chunk_size\?[^\n]*$"):
        ContinuumLMCacheConnector.check_settings(with_extra(engine, **{"lmcache.chunk_siz": 512}))
    with pytest.raises(ConfigError, match="192 tokens and vLLM's block 128"):
        ContinuumLMCacheConnector.check_settings(with_extra(engine, **{"lmcache.chunk_size": 192}))


def test_a_load_that_fails_is_recomputed(engine):
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    assert scheduler.recompute_kv_load_failures


def pinned_chunks(_worker) -> int:
    """Chunks that the worker holds pinned, in DRAM and on disk. Runs in the worker."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    backends = get_kv_transfer_group()._impl.lmcache_engine.storage_manager.storage_backends
    in_dram, on_disk = backends["LocalCPUBackend"].hot_cache, backends["LocalDiskBackend"].dict
    return sum(chunk.is_pinned for held in (in_dram, on_disk) for chunk in list(held.values()))


@pytest.fixture
def rule(engine):
    """Lets a test decide what is loaded, as LoadPolicy does; afterwards everything is loaded again."""
    yield engine.connector.set_load_selector
    engine.connector.set_load_selector(lambda _, where: where.dram_tokens + where.ssd_tokens)


def test_a_declined_load_is_computed_exactly_and_leaves_no_pin_behind(engine, rule):
    p = prompt(70, 3)
    cold = engine.run(p)[0]
    asked = []
    rule(lambda _, where: asked.append(where) or 0)
    for _ in range(2):
        engine.forget_gpu()
        assert engine.located(p) == TierHit(3 * CHUNK, 0)
        assert engine.run(p)[0] == cold
        assert asked[-1].dram_tokens == 3 * CHUNK
        assert engine.llm.collective_rpc(pinned_chunks) == [0]
    rule(lambda _, where: where.dram_tokens)
    engine.forget_gpu()
    assert engine.run(p)[0][0] == 3 * CHUNK, "it was still there"


def test_the_disks_part_is_computed_where_only_drams_is_wanted_and_is_in_dram_then(engine, rule):
    p = prompt(71, 3)
    engine.run(p)
    engine.run(prompt(97, DRAM_CHUNKS))  # takes all of DRAM
    engine.forget_gpu()
    assert engine.located(p) == TierHit(0, 3 * CHUNK)
    engine.run(p[: CHUNK + 64])  # brings its first chunk back from the disk
    engine.forget_gpu()
    assert engine.located(p) == TierHit(CHUNK, 2 * CHUNK)
    rule(lambda _, where: where.dram_tokens)
    reused, steps = engine.run(p)[0]
    assert reused == CHUNK and len(steps) == 8
    assert engine.llm.collective_rpc(pinned_chunks) == [0]
    assert engine.located(p) == TierHit(3 * CHUNK, 0)


def test_a_copy_that_brings_nothing_is_noticed(engine):
    p = prompt(3, 3)
    engine.run(p)
    own = engine.run(p)[0]
    engine.forget_gpu()
    for other in (prompt(2, DRAM_CHUNKS + 2), prompt(98, DRAM_CHUNKS)):  # both fill every GPU block
        engine.run(other)
    assert engine.located(p) != TierHit(0, 0)
    (engine.disk / "broken").touch()
    reused, steps = engine.run(p)[0]
    (engine.disk / "broken").unlink()
    assert reused == own[0]
    assert steps != own[1]
