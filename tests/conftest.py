"""Shared fixtures: settings for a bench, the small model, LMCache's server, the traces' folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import hypothesis
import pytest
import torch
from filelock import FileLock

from continuum_lmcache.policy.named import POLICIES
from experiments import policies
from experiments.tiny_model import make_model

HELPERS = [file.stem for file in Path(__file__).parent.glob("*.py") if not file.stem.startswith("test_")]
pytest.register_assert_rewrite(*HELPERS)  # their assertions too say what differs
ROOT = Path(__file__).resolve().parent.parent
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(WORKER % (os.cpu_count() or 1))  # a core for each worker
os.environ["OMP_NUM_THREADS"] = "1"  # in child processes too; more threads than cores would spin
os.environ["TORCH_COMPILE_DISABLE"] = "1"  # vLLM compiles two functions of its sampler in every server
torch.set_num_threads(1)

# No deadline and no check of the drawing's speed: both are wall clock, and fail on a busy machine.
hypothesis.settings.register_profile(
    "fixed",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "fuzz",
    hypothesis.settings.get_profile("fixed"),
    derandomize=False,
    max_examples=1000,
    print_blob=True,
)
hypothesis.settings.load_profile("fixed")  # --hypothesis-profile is read later


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # xdist would begin with the files that have the most tests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files with real engines first: they take longest, and one that began last would end alone."""
    long = {item.path for item in items if item.get_closest_marker("real")}
    items.sort(key=lambda item: item.path not in long)


@pytest.fixture(scope="session", autouse=True)
def _servers_end_before_the_log_does() -> Iterator[None]:
    yield
    if (rigs := sys.modules.get("lmcache_mp_rig")) is not None:
        for ending in rigs.ENDING:
            ending.join()


@pytest.fixture(scope="session")
def model() -> Path:
    """The small model's directory, made once, by the first worker."""
    folder = ROOT / ".work" / "tiny-model"
    folder.parent.mkdir(exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        return make_model(folder)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A real browser; where there is none, its tests are skipped."""
    from browser import browser

    with browser() as running:
        yield running


@pytest.fixture
def mp_rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """LMCache's MP server in this process with our connector's parts; a test may make several."""
    pytest.importorskip("lmcache")
    from lmcache_mp_rig import mp_rigs

    monkeypatch.setenv("LMCACHE_TRACK_USAGE", "false")
    with mp_rigs(tmp_path) as make:
        yield make


@pytest.fixture
def make(model: Path, settings: Callable[..., None]) -> Iterator[Callable[..., Any]]:
    """Makes benches (bench.py). At the end each runs idle, and no turn, no pin and no block is left."""
    from bench import Bench, check_nothing_is_left

    from continuum_lmcache.vllm_plugin.scheduler import ContinuumScheduler

    made: list[Bench] = []

    def build(
        blocks: int = 20,
        budget_tokens: int = 2048,
        transfer: dict[str, Any] | None = None,
        cls: Any = ContinuumScheduler,
        kind: type[Bench] = Bench,
        **values: Any,
    ) -> Bench:
        settings(**values)
        made.append(kind(cls, model, blocks, budget_tokens, transfer))
        return made[-1]

    yield build
    for bench in made:
        check_nothing_is_left(bench)


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """What a module logs from now on at a level, also where an earlier test has silenced vLLM's logger."""

    def listen(module: Any, level: str = "warning") -> list[str]:
        lines, logger = list[str](), MagicMock()
        getattr(logger, level).side_effect = lambda text, *args: lines.append(text % args)
        monkeypatch.setattr(module, "logger", logger)
        return lines

    return listen


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `continuum-lmcache` in this process (console.py)."""
    from console import Command

    monkeypatch.setenv("COLUMNS", "200")
    return Command(capsys)


@pytest.fixture
def anyio_backend() -> str:
    """For tests that are coroutines."""
    return "asyncio"


@pytest.fixture(scope="session")
def traces() -> Path:
    """Real traces, if they are available: `TRACES_DIR`, else a folder beside the checkout."""
    folder = Path(os.environ.get("TRACES_DIR", ROOT.parent / "shared" / "traces"))
    if not folder.is_dir():
        pytest.skip(f"no traces in {folder} (set TRACES_DIR)")
    return folder


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets CONTINUUM_* variables for a bench; `without`: some of policies.SWITCHES."""
    for name in [n for n in os.environ if n.startswith("CONTINUUM_")]:
        monkeypatch.delenv(name)

    def put(without: Sequence[str] = (), policy: str = "", **values: Any) -> None:
        if policy:
            values["policy"] = policies.setting(policy)
        for name, value in values.items():
            monkeypatch.setenv(f"CONTINUUM_{name.upper()}", str(value))
        if without:
            variant = policies.without(os.environ["CONTINUUM_POLICY"], *without)
            monkeypatch.setitem(POLICIES, "variant", variant)
            monkeypatch.setenv("CONTINUUM_POLICY", "variant")

    put(policy="static-ttl", static_ttl_s=8, record_ids=True)
    return put
