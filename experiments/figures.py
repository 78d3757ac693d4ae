"""The pictures: dark blue is continuum, black is stock vLLM, all else is grey.

python -m experiments.figures     those whose rows are in experiments/records/figures
"""

from __future__ import annotations

import csv
import textwrap
from collections import Counter
from pathlib import Path
from statistics import median

import matplotlib
import numpy as np
import typer

from continuum_lmcache.config import ContinuumConfig
from experiments.tables import SOURCES, Summary, caption

matplotlib.use("Agg")  # no display
matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "sweep"}  # small, the same each time
from matplotlib import pyplot as plt  # noqa: E402 (after the backend is chosen)
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

OURS, STOCK, OTHER = "#1b3a5b", "black", "0.6"
UNDATED = {".png": {"Software": None}, ".svg": {"Date": None}}
LIMIT_S = ContinuumConfig().first_token_limit_s
LINES = ("-", "--", ":", "-.")  # told apart without colour
FILLS = {  # blue: kept, the darker the nearer; grey: new; black: lost and computed again
    "gpu": ("#1b3a5b", ""),
    "dram": ("#7f9bb8", "//"),
    "ssd": ("#cfdae6", "xx"),
    "offload": ("#7f9bb8", "//"),
    "computed": ("0.8", ""),
    "again": ("black", ""),
}
RECORDS = Path(__file__).parent / "records" / "figures"
SHOWN = {"fcfs": "stock vLLM", "continuum-published": "the paper's policy", "continuum": "continuum"}


def colour(label: str) -> str:
    """By what served: "fcfs + LMCache" is stock vLLM's."""
    name = label.partition(" ")[0].partition("+")[0].rstrip(",")
    return {"continuum": OURS, "fcfs": STOCK}.get(name, OTHER)


def draw(runs: dict[str, list[Summary]], path: Path) -> list[Path]:
    """Write PNG and SVG at `path` (its suffix is replaced) and return them."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    draw_job_times(left, runs)
    draw_sources(right, runs)
    figure.supxlabel(caption(runs), fontsize=8)
    return save(figure, path)


def save(figure: Figure, path: Path) -> list[Path]:
    """Write PNG and SVG at `path` (its suffix is replaced) and return them."""
    written = [path.with_suffix(suffix) for suffix in UNDATED]
    for target in written:
        figure.savefig(target, dpi=150, metadata=UNDATED[target.suffix])
    plt.close(figure)
    return written


def draw_job_times(axes: Axes, runs: dict[str, list[Summary]]) -> None:
    """The share of all programs that finished within a time, all seeds of a label together; where some were
    cut off the curve ends below 1. Each is drawn to the end of the longest run."""
    every_s = [s for found in runs.values() for summary in found for s in summary["job_times_s"]]
    for index, (label, summaries) in enumerate(runs.items()):
        cut = Counter(s for summary in summaries for s in summary.get("cut_s", []))
        timed = Counter(s for summary in summaries for s in summary["job_times_s"])
        times_s = sorted((timed - cut).elements())
        shares = np.arange(len(times_s) + 1) / max(1, len(times_s) + cut.total())
        style = {"linestyle": LINES[index % len(LINES)], "color": colour(label), "linewidth": 2}
        if times_s:
            at_s, levels = [times_s[0], *times_s, max(every_s)], [*shares, shares[-1]]
            axes.step(at_s, levels, where="post", label=label, **style)
    axes.set(xlabel="seconds since the agent began", ylabel="share of agents that have finished")
    axes.set(xlim=(0, None), ylim=(0, 1.02), title="How long does an agent take?")
    if axes.lines:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), fontsize="small", ncols=2)  # beside them


def draw_sources(axes: Axes, runs: dict[str, list[Summary]]) -> None:
    """Shares of the prompt tokens by source, stacked; over all seeds of a label."""
    ticks = [textwrap.fill(label, 16) for label in runs]
    every = [sum(map(Counter, (s["tokens_by_source"] for s in found)), Counter()) for found in runs.values()]
    bottoms = np.zeros(len(runs))
    for source, (shade, hatch) in FILLS.items():
        heights = np.array([100 * tokens[source] / max(1, tokens.total()) for tokens in every])
        if heights.any():
            name = SOURCES[source]
            axes.bar(ticks, heights, 0.6, bottoms, label=name, color=shade, hatch=hatch, edgecolor="white")
            bottoms += heights
    axes.set(ylabel="% of the prompt tokens", title="Where does a prompt's KV come from?")
    if axes.patches:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def grouped(rows: Path, *columns: str) -> dict[tuple[str, ...], list[dict[str, str]]]:
    """A CSV's rows by these columns, in their order."""
    found: dict[tuple[str, ...], list[dict[str, str]]] = {}
    with rows.open() as file:
        for row in csv.DictReader(file):
            found.setdefault(tuple(row[column] for column in columns), []).append(row)
    return found


def draw_tiers(rows: Path, path: Path) -> list[Path]:
    """Benefit left, price right, by where KV goes when the GPU is full; medians over the draws."""
    found = grouped(rows, "setting", "contender")
    settings = list(dict.fromkeys(setting for setting, _ in found))
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    titles = {
        "job_mean_s": "How long does an agent take?",
        "ttft_max_s": "The longest wait for a first token?",
    }
    for axes, (column, title) in zip(panels, titles.items(), strict=True):
        for index, (contender, label) in enumerate(SHOWN.items()):
            places = np.arange(len(settings)) + 0.27 * (index - 1)
            values = [[float(r[column]) for r in found[setting, contender]] for setting in settings]
            bars = axes.bar(places, [median(v) for v in values], 0.25, color=colour(contender), label=label)
            axes.bar_label(bars, fmt="{:,.0f}", fontsize=8)
        axes.set_xticks(range(len(settings)), [textwrap.fill(setting, 18) for setting in settings])
        axes.set(ylabel="seconds", title=title)
    panels[0].legend(fontsize="small")
    return save(figure, path)


def draw_frontier(rows: Path, path: Path) -> list[Path]:
    """A panel per number of live sessions: the longest first token over the 90th percentile, a dot per
    contender, and a line along `longest_wait_s` of ours."""
    found = grouped(rows, "sessions")
    figure, panels = plt.subplots(1, len(found), figsize=(3.8 * len(found), 3.6), layout="constrained")
    for axes, ((sessions,), shown) in zip(panels, found.items(), strict=True):
        at = [(float(row["ttft_p90_s"]), float(row["ttft_max_s"]), row["contender"]) for row in shown]
        ours = [(x, y) for x, y, name in at if colour(name) == OURS]
        axes.plot(*zip(*ours, strict=True), color=OURS)
        for x, y, name in at:
            axes.plot(x, y, "o", color=colour(name))
            label = SHOWN.get(name, name).removeprefix("continuum, ")
            is_left = colour(name) == OURS and (x, y) != max(ours)  # of the line
            place = (-5 if is_left else 5, {OURS: -9, STOCK: -4}.get(colour(name), 4))
            side = "right" if is_left else "left"
            axes.annotate(label, (x, y), place, textcoords="offset points", fontsize=7, ha=side)
        axes.set(title=sessions, xlabel="90th percentile, s", ylabel="longest, s")
        axes.set(xlim=(0, 1.5 * max(x for x, _, _ in at)), ylim=(0, 1.15 * max(y for _, y, _ in at)))
        axes.grid(color="0.9")
    figure.suptitle("First tokens of live sessions, simulated; blue: continuum by longest_wait_s", fontsize=9)
    return save(figure, path)


def draw_rising(rows: Path, path: Path) -> list[Path]:
    """Load that rises and falls: programs, replicas and first tokens over time (experiments.fleet.rising)."""
    with rows.open() as file:
        found = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    minutes = [row["until_s"] / 60 for row in found]
    served = [row["in_time"] * row["up"] for row in found]
    panels = {  # title: its curves; of each values, colour, line and label
        "Programs": [
            ([row["live"] for row in found], OURS, "-", "live"),
            (served, OTHER, "--", "served in time by the replicas there are"),
        ],
        "Replicas": [
            ([row["up"] for row in found], OURS, "-", "there are"),
            ([row["wanted"] for row in found], OTHER, "--", "the signal asks for"),
        ],
        "First tokens, 90th percentile of five minutes, s": [
            ([row["p90_s"] for row in found], OURS, "-", "with the signal"),
            ([row["alone_p90_s"] for row in found], OTHER, "--", "one replica alone"),
            ([LIMIT_S] * len(found), STOCK, ":", "the limit"),
        ],
    }
    figure, grid = plt.subplots(len(panels), 1, figsize=(8, 7), sharex=True, layout="constrained")
    for axes, (title, curves) in zip(grid, panels.items(), strict=True):
        for values, ink, line, label in curves:
            axes.plot(minutes, values, line, color=ink, label=label)
        axes.set_title(title, fontsize=9, loc="left")
        axes.legend(fontsize=7, loc="upper left")
        axes.grid(color="0.9")
    grid[0].set_ylim(0, 2.5 * max(row["live"] for row in found))  # an idle engine says hundreds
    grid[-1].set(yscale="log", xlabel="minutes")
    return save(figure, path)


def main() -> None:
    """Draw the figures again whose rows are in experiments/records/figures."""
    for draw_rows, rows, picture in (
        (draw_tiers, "tiers", "benefit-and-price"),
        (draw_frontier, "frontier", "frontier"),
        (draw_rising, "rising", "rising"),
    ):
        print(*draw_rows(RECORDS / f"{rows}.csv", RECORDS / picture), sep="\n")


if __name__ == "__main__":
    typer.run(main)
