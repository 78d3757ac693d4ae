"""`vllm` whose engines, workers and front-ends are forks of one process, which imports everything once.

    python experiments/forking_vllm.py serve MODEL ...

On a CPU vLLM spawns them, and each imports everything anew: some seconds of a core. That a spawned process
loads the plugin by itself is tested where vLLM itself is started: test_wheel.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

COMMAND = (sys.executable, __file__)  # in place of `vllm`


class OfVllm:
    """In place of `sys` in vLLM's search through all modules, which fails at one of numba's."""

    @property
    def modules(self) -> dict[str, ModuleType]:
        return {name: module for name, module in sys.modules.items() if name.startswith("vllm")}


def fork_from_now_on(put: Callable[[Any, str, Any], None]) -> None:
    """`put` is setattr, or a monkeypatch's. No OpenMP threads may run yet: a fork has none of them."""
    from vllm.triton_utils import dispatcher

    forking = multiprocessing.get_context("fork")
    put(multiprocessing, "get_context", lambda _=None: forking)
    put(dispatcher, "sys", OfVllm())


if __name__ == "__main__":
    del sys.path[0]  # experiments/
    fork_from_now_on(setattr)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # else it wakes the parent's loop
    from vllm.entrypoints.cli.main import main

    sys.exit(main())
