"""Imports vLLM once, and forks a process for each scheduler that runs the tests. For own_tests.py.

    python -m experiments.trust.own_run TREE stock,fcfs,continuum FILE...

vLLM's import takes longer than most of its scheduler tests, so it is shared by forking: nothing in
this process has started a thread or an engine yet. Writes TREE/NAME.xml and TREE/NAME.log. The module is
also pytest's plugin there.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

STOCK = "stock"


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module is imported."""
    for marker in ("cpu_test", "skip_global_cleanup", "slow_test", "core_model"):
        config.addinivalue_line("markers", f"{marker}: vLLM's")


@pytest.fixture
def caplog_vllm(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """vLLM's log at INFO, like the fixture of this name in vLLM's conftest."""
    logger = logging.getLogger("vllm")
    propagate, logger.propagate = logger.propagate, True
    with caplog.at_level(logging.INFO):
        yield caplog
    logger.propagate = propagate


def swap(policy: str) -> None:
    """Give vLLM's own tests our scheduler classes with this policy where they import vLLM's."""
    import vllm.v1.core.sched.async_scheduler as async_module
    import vllm.v1.core.sched.scheduler as sync_module

    from continuum_lmcache.vllm_plugin import scheduler as ours
    from experiments.policies import setting

    os.environ["CONTINUUM_POLICY"] = setting(policy)
    sync_module.Scheduler = ours.ContinuumScheduler  # type: ignore[misc]
    async_module.AsyncScheduler = ours.ContinuumAsyncScheduler  # type: ignore[misc]


def in_child(tree: Path, name: str, files: list[str]) -> int:
    """Fork; the child runs pytest on the files and never returns. The child's process id."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    log = os.open(tree / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if name != STOCK:
        swap(name)
    report = ["--junitxml", str(tree / f"{name}.xml"), "-o", "junit_family=xunit1"]
    quiet = ["-q", "-p", "no:cacheprovider", "--tb=short"]
    confined = ["-c", os.devnull, "--rootdir=.", "--confcutdir=tests/v1"]  # the top conftest wants a hub
    os._exit(int(pytest.main([*report, *quiet, *confined, *files], [sys.modules[__name__]])))


def main(tree: Path, names: list[str], files: list[str]) -> None:
    """Run them side by side."""
    os.chdir(tree)
    import vllm.v1.core.sched.async_scheduler
    import vllm.v1.engine.core  # noqa: F401

    for child in [in_child(tree, name, files) for name in names]:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:])
