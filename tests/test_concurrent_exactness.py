"""Eight programs at once over GPU, DRAM and disk, evicted, preempted, loaded again: token for token right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("lmcache")

from connectors.lmcache import ContinuumLMCacheConnector
from connectors.lmcache_cpu import BlockCopier
from experiments.exactness import SETTINGS, engine, off_by, play, reference, sources

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


class MixingCopier(BlockCopier):
    """The copier under test; while the flag file exists it brings the chunk that came before: the control."""

    flag: Path
    before: Any = None

    def to_gpu(self, memory_obj, start, end, **kwargs):
        mine = memory_obj.tensor.clone()
        if self.flag.exists() and self.before is not None:
            memory_obj.tensor.copy_(self.before)
        super().to_gpu(memory_obj, start, end, **kwargs)
        memory_obj.tensor.copy_(mine)
        self.before = mine


class MixingConnector(ContinuumLMCacheConnector):
    copier = MixingCopier

    def __init__(self, vllm_config, role, kv_cache_config):
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        MixingCopier.flag = Path(extra["lmcache.local_disk"].removeprefix("file://")) / "mixing"
        super().__init__(vllm_config, role, kv_cache_config)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def llm(model: Path, disk: Path) -> Iterator[Any]:  # noqa: ARG001
    with pytest.MonkeyPatch.context() as env:
        for name, value in SETTINGS.items():
            env.setenv(name, value)
        made = engine(disk, {"kv_connector": MixingConnector.__name__, "kv_connector_module_path": __name__})
        yield made
        made.llm_engine.engine_core.shutdown()


def test_every_token_is_what_the_model_says_without_a_cache(llm: Any) -> None:
    stories, model = play(llm, 8, seed=1), reference()
    found = sources(llm)
    assert min(found[tier] for tier in ("gpu", "dram", "ssd")) > 0, f"tiers not mixed: {found}"
    assert found["preemptions"] > 0 and found["loaded after preemption"] > 0, f"nothing came back: {found}"
    off = [delta for story in stories for delta in off_by(story, model)]
    assert len(off) == 8 * 3 * 40
    assert max(off) < 1e-3
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    assert not scheduler._keeper.ledger.pinned and scheduler.get_kv_cache_usage() == 0.0


def test_chunks_of_another_place_are_noticed(llm: Any, disk: Path) -> None:
    (disk / "mixing").touch()
    stories, model = play(llm, 4, seed=2), reference()
    assert max(delta for story in stories for delta in off_by(story, model)) > 0.1
