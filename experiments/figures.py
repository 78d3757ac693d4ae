"""The figure for the table: the distribution of job times, and the sources of the prompts' KV."""

from __future__ import annotations

import textwrap
from pathlib import Path

import matplotlib
import numpy as np

from experiments.tables import SOURCES, Summary, caption

matplotlib.use("Agg")  # no display
from matplotlib import pyplot as plt  # noqa: E402 (after the backend is chosen)
from matplotlib.axes import Axes  # noqa: E402

LINES = ("-", "--", ":", "-.")  # told apart without colour
FILLS = {  # light to dark as a token gets dearer, hatched so that neighbours differ in grey
    "gpu": ("0.92", ""),
    "dram": ("0.78", "//"),
    "ssd": ("0.62", "xx"),
    "offload": ("0.70", "//"),
    "again": ("0.45", ".."),
    "computed": ("0.30", ""),
}


def draw(runs: dict[str, list[Summary]], path: Path) -> list[Path]:
    """Write PNG and SVG at `path` (its suffix is replaced) and return them."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    draw_job_times(left, runs)
    draw_sources(right, runs)
    figure.suptitle(caption(runs), fontsize=9)
    written = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
    for target in written:
        figure.savefig(target, dpi=150)
    plt.close(figure)
    return written


def draw_job_times(axes: Axes, runs: dict[str, list[Summary]]) -> None:
    """The share of programs finished within a time; all seeds of a label together."""
    for index, (label, summaries) in enumerate(runs.items()):
        times_s = np.sort([s for summary in summaries for s in summary["job_times_s"]])
        if len(times_s):
            shade = str(0.6 * index / max(1, len(runs) - 1))
            axes.ecdf(times_s, label=label, linestyle=LINES[index % len(LINES)], color=shade, linewidth=2)
    axes.set(xlabel="job time, s", ylabel="share of programs", xlim=(0, None), title="Job time")
    if axes.lines:
        axes.legend(loc="upper left", fontsize="small")


def draw_sources(axes: Axes, runs: dict[str, list[Summary]]) -> None:
    """Prompt tokens by source, stacked; the mean over a label's seeds."""
    labels = list(runs)
    ticks = [textwrap.fill(label, 16) for label in labels]
    bottoms = np.zeros(len(labels))
    for source, (shade, hatch) in FILLS.items():
        heights = np.array(
            [np.mean([s["tokens_by_source"].get(source, 0) for s in runs[label]]) / 1000 for label in labels]
        )
        if heights.any():
            name = SOURCES[source]
            axes.bar(ticks, heights, 0.6, bottoms, label=name, color=shade, hatch=hatch, edgecolor="black")
            bottoms += heights
    axes.set(ylabel="prompt tokens, thousands", title="Where the KV came from")
    if axes.patches:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
