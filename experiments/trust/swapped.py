"""A pytest plugin that gives vLLM's own tests our scheduler classes where they import vLLM's.

OWN_TESTS_SCHEDULER=continuum pytest -p experiments.trust.swapped ...    # a policy's name, or stock
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
import vllm.v1.core.sched.async_scheduler as async_module
import vllm.v1.core.sched.scheduler as sync_module

from experiments.trust.own_tests import SCHEDULER, STOCK


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module is imported."""
    for marker in ("cpu_test", "skip_global_cleanup", "slow_test", "core_model"):
        config.addinivalue_line("markers", f"{marker}: vLLM's")
    if (name := os.environ[SCHEDULER]) != STOCK:
        from continuum_lmcache.vllm_plugin import scheduler as ours
        from experiments.policies import setting

        os.environ["CONTINUUM_POLICY"] = setting(name)
        sync_module.Scheduler = ours.ContinuumScheduler  # type: ignore[misc]
        async_module.AsyncScheduler = ours.ContinuumAsyncScheduler  # type: ignore[misc]


@pytest.fixture
def caplog_vllm(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """vLLM's log at INFO, like the fixture of this name in vLLM's conftest."""
    logger = logging.getLogger("vllm")
    propagate, logger.propagate = logger.propagate, True
    with caplog.at_level(logging.INFO):
        yield caplog
    logger.propagate = propagate
