"""A soak's figure and table: the level of each figure after the warm-up, and its growth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from experiments.sweep.conditions import when

WARM_UP = 1 / 3  # of the run
FLAT = 0.02  # growth after the warm-up that counts as none, as a share
FLAT_FILES = 2  # and in files
NOTE = """oneDNN, which computes for vLLM on a CPU, keeps compiled code for the last 1,024 prompt lengths;
here `ONEDNN_PRIMITIVE_CACHE_CAPACITY=32`, or the worker grows for as long as lengths are new
(experiments/log/2026-11-20.md)."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The server at one moment."""

    at_s: float
    mib: dict[str, float]  # resident, by process
    files: dict[str, int]  # open, by process
    programs: float  # in the scheduler's table
    pinned_blocks: float
    gaps: int  # observations in all CDF windows
    started: int  # programs since the start
    turns: int  # finished since the start


def series(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """The figures that should not grow, by name."""
    found = {f"memory of the {name}, MiB": [s.mib[name] for s in samples] for name in samples[0].mib}
    found |= {f"open files of the {name}": [s.files[name] for s in samples] for name in samples[0].files}
    found["programs in the table"] = [s.programs for s in samples]
    found["pinned blocks"] = [s.pinned_blocks for s in samples]
    found["gaps in the CDF windows"] = [s.gaps for s in samples]
    return found


def growth(values: Sequence[float]) -> tuple[float, float]:
    """Level just after the warm-up and at the end: medians over a tenth of the run."""
    tenth = max(1, len(values) // 10)
    start = int(len(values) * WARM_UP)
    return float(np.median(values[start : start + tenth])), float(np.median(values[-tenth:]))


def verdict(name: str, before: float, after: float) -> str:
    allowed = FLAT_FILES if "files" in name else FLAT * before
    return "flat" if after - before <= allowed else f"+{(after - before) / before:.1%}"


def report(samples: Sequence[Sample], failed: int, docs: Path) -> None:
    """Write soak.md and soak.png, print the table."""
    last = samples[-1]
    rows = []
    for name, values in series(samples).items():
        before, after = growth(values)
        rows.append(f"| {name} | {before:,.0f} | {after:,.0f} | {verdict(name, before, after)} |")
    head = (
        f"{last.started:,} programs, {last.turns:,} turns in {last.at_s / 60:.1f} minutes, {failed} turns "
        f"failed. Medians over a tenth of the run: after its first third, and at its end."
    )
    table = "\n".join(["| | after warm-up | end | growth |", "|---|---|---|---|", *rows])
    command = f"    python -m experiments.soak      # {when()}"
    text = f"# Soak\n\n{command}\n\n{head}\n\n{table}\n\n{NOTE}\n\n![soak](soak.png)\n"
    (docs / "soak.md").write_text(text)
    draw(samples, docs / "soak.png")
    print(f"{head}\n\n{table}")


def draw(samples: Sequence[Sample], path: Path) -> None:
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots(2, 2)
    minutes = [s.at_s / 60 for s in samples]
    groups = {
        "resident memory, MiB": "memory of the ",
        "open files": "open files of the ",
        "scheduler's table": ("programs in", "pinned"),
        "observations in CDF windows": "gaps",
    }
    for axis, (title, begin) in zip(axes.flat, groups.items(), strict=True):
        for name, values in series(samples).items():
            if name.startswith(begin):
                axis.plot(minutes, values, label=name)
        axis.axvline(minutes[-1] * WARM_UP, color="grey", linestyle=":")
        axis.set(title=title, xlabel="minutes", ylim=(0, None))
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=110)
