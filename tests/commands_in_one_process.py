"""Runs commands as their users would, each in a fork of one process that has imported large packages once.

    echo '[["python", "experiments/replay.py", "--help"]]' | python tests/commands_in_one_process.py

Scripts named by a path run in another folder than the repository, modules and console scripts in it. Prints
a JSON list of [exit status, output].
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
import traceback
from importlib.metadata import entry_points
from pathlib import Path

import aiohttp  # noqa: F401
import matplotlib.pyplot  # noqa: F401
import scipy.optimize  # noqa: F401
import typer.rich_utils  # noqa: F401
import vllm.engine.arg_utils  # noqa: F401
import vllm.v1.core.sched.scheduler  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
CRASHED = 70


def run(command: list[str], folder: str) -> None:
    """Run in this process, as the interpreter would."""
    sys.path[:] = [path for path in sys.path[1:] if Path(path).resolve() != ROOT]
    program, *arguments = command
    os.chdir(ROOT)
    if program != "python":
        (script,) = entry_points(group="console_scripts", name=program)
        sys.argv = command
        sys.exit(script.load()())
    if arguments[0] == "-m":
        sys.path.insert(0, str(ROOT))
        sys.argv = arguments[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        path = ROOT / arguments[0]
        sys.path.insert(0, str(path.parent))
        os.chdir(folder)
        sys.argv = [str(path), *arguments[1:]]
        runpy.run_path(sys.argv[0], run_name="__main__")


def forked(command: list[str], folder: str) -> tuple[int, str]:
    """The exit status and all that was written."""
    written = Path(folder, "output")
    pid = os.fork()
    if pid == 0:
        status = CRASHED
        with written.open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            try:
                run(command, folder)
                status = 0
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else int(end.code is not None)
            except ImportError:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
    _, ended = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(ended), written.read_text()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as empty:
        print(json.dumps([forked(command, empty) for command in json.load(sys.stdin)]))
