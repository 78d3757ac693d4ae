"""Imports vLLM once, and forks a process for each scheduler that runs the tests. For own_tests.py.

    python -m experiments.trust.own_run TREE stock,fcfs,continuum FILE...

vLLM's import takes longer than most of its scheduler tests, so it is shared by forking: nothing in
this process has started a thread or an engine yet. Writes TREE/NAME.xml and TREE/NAME.log.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

STOCK = "stock"
SCHEDULER = "OWN_TESTS_SCHEDULER"  # a policy's name, or "stock"


def in_child(tree: Path, name: str, files: list[str]) -> int:
    """Fork; the child runs pytest on the files and never returns. The child's process id."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    log = os.open(tree / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ[SCHEDULER] = name
    if name != STOCK:
        from experiments.policies import setting

        os.environ["CONTINUUM_POLICY"] = setting(name)
    import pytest

    report = ["--junitxml", str(tree / f"{name}.xml"), "-o", "junit_family=xunit1"]
    quiet = ["-q", "-p", "no:cacheprovider", "--tb=short", "-p", "experiments.trust.swapped"]
    confined = ["-c", os.devnull, "--rootdir=.", "--confcutdir=tests/v1"]  # the top conftest wants a hub
    os._exit(int(pytest.main([*report, *quiet, *confined, *files])))


def main(tree: Path, names: list[str], files: list[str]) -> None:
    """Run them side by side."""
    os.chdir(tree)
    import vllm.v1.core.sched.async_scheduler
    import vllm.v1.engine.core  # noqa: F401

    for child in [in_child(tree, name, files) for name in names]:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:])
