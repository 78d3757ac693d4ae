"""Runs the cases that have no row yet: in this process, or in a pool of processes."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tqdm import tqdm

from continuum_lmcache.config import ENV_PREFIX
from continuum_lmcache.errors import ContinuumError
from experiments.client import ServerUnusable
from experiments.server import ServerError
from experiments.sweep.cases import Case, Live, Point, SessionPoint, SweepError
from experiments.sweep.rows import Rows


def complete(rows: Rows, cases: Sequence[Case], jobs: int, quiet: bool = False) -> None:
    """Add a row for each case that lacks one, as soon as it is finished.

    Raises SweepError for the first simulated case that fails. A server's failure costs its own row alone:
    it is printed at once, the others are measured, and SweepError names all such cases at the end.
    """
    refuse_settings()
    missing, failed = rows.missing(cases), list[SweepError]()
    keep = rows.path.parent / "live"
    finished = measured(missing, jobs, keep, failed)
    for case, figures in tqdm(finished, total=len(missing), unit="row", disable=quiet):
        rows.add(case, figures)
    if failed:
        raise SweepError("\n".join([f"{len(failed)} rows are missing:", *map(str, failed)]))


def measured(
    cases: Sequence[Case], jobs: int, keep: Path, failed: list[SweepError]
) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Each case with its figures, as they end. Simulations share the cores, servers do not.

    The output of a server and its clients stays in the case's folder in `keep`; the reason of a missing row
    is added to `failed`.
    """
    points = [case for case in cases if not isinstance(case, Live)]
    alone = [case for case in cases if isinstance(case, Live)]
    if jobs == 1 or len(points) == 1:
        yield from ((point, measure(point, keep)) for point in points)
    elif points:
        with ProcessPoolExecutor(min(jobs, len(points)), multiprocessing.get_context("spawn")) as pool:
            running = {pool.submit(measure, point, keep): point for point in points}
            try:
                for done in as_completed(running):
                    yield running[done], done.result()
            finally:  # stopped or failed: do not wait for cases that have not started
                pool.shutdown(cancel_futures=True)
    for case in alone:
        try:
            figures = measure(case, keep)
        except SweepError as error:
            tqdm.write(f"{error}", file=sys.stderr)
            failed.append(error)
        else:
            yield case, figures


def measure(case: Case, keep: Path) -> dict[str, Any]:
    """The case's figures. vLLM is imported here: a figure from finished rows needs none.

    Raises SweepError that names the case, if the simulator refuses it, its tables do not balance, or the
    server does not start or answer.
    """
    from experiments.sweep import closed_loop, live, simulated

    try:
        if isinstance(case, Point):
            return simulated.run(case)
        if isinstance(case, SessionPoint):
            return closed_loop.run(case)
        return live.run(case, keep / named(case))
    except (ContinuumError, ServerError, ServerUnusable) as error:
        raise SweepError(f"{case}: {error}") from error


def named(case: Live) -> str:
    """A folder's name for the case."""
    tiers_mb = "-".join(f"{gb * 1e3:.0f}" for gb in (case.dram_gb, case.ssd_gb))
    name = f"{case.contender}-{case.workload}-{tiers_mb}-{case.programs}x{case.jps:g}-seed{case.seed}"
    return name.replace(":", "-")


def refuse_settings() -> None:
    """Refuse settings in the environment: they would override every point's, and no row would show it."""
    if found := sorted(name for name in os.environ if name.startswith(ENV_PREFIX)):
        raise SweepError(f"{', '.join(found)} in the environment would change every run; unset it")
