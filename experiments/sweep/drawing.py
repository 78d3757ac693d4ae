"""A figure as PNG and SVG: a panel per setting, a line per contender, a dot per seed.

Dark blue is continuum, black stock vLLM, all else grey.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from statistics import median

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

from experiments.figures import colour, plt, save
from experiments.sweep.plans import WORDS, Plan
from experiments.sweep.readout import BySeed, Found, caption, panels, ratios
from experiments.tables import spread

MOST_COLUMNS = 3
TITLE_CHARACTERS = 16  # an inch of the title
WIDE = 5.0  # a panel's largest value over its smallest, from which its scale is logarithmic


def draw(plan: Plan, pairs: Found, path: Path) -> list[Path]:
    """Write PNG and SVG at `path` (a suffix is added) and return them."""
    laid = [(WORDS[figure], panels(plan, pairs, figure)) for figure in plan.drawn or plan.shows]
    cells = [(words, panel, labels) for words, found in laid for panel, labels in found.items()]
    columns = min(MOST_COLUMNS, len(laid[0][1]))
    lines = max(len(labels) for _, _, labels in cells)
    rows = -(-len(cells) // columns)
    size = (2.2 + 3.4 * columns, 0.5 + rows * (1.2 + 0.3 * lines))
    figure, grid = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axes in grid.flat[len(cells) :]:
        axes.set_axis_off()
    for axes, (words, panel, labels) in zip(grid.flat, cells, strict=False):
        draw_panel(axes, panel, labels, plan)
        axes.set_xlabel(f"{words}; dot: a seed, bar: median\nx: {plan.baseline} / this", fontsize=7)
    title = f"{plan.title}. {caption(pairs)}".splitlines()
    width = round(TITLE_CHARACTERS * size[0])
    figure.suptitle("\n".join(textwrap.fill(line, width) for line in title), fontsize=8)
    return save(figure, path)


def draw_panel(axes: Axes, panel: str, labels: dict[str, BySeed], plan: Plan) -> None:
    """A line per label, with a dot per seed; at the right edge its ratio to the baseline, seed by seed."""
    names, baseline = list(labels), labels.get(plan.baseline, {})
    for at, (label, by_seed) in enumerate(labels.items()):
        values = list(by_seed.values())
        axes.plot(values, [at] * len(values), "o", color=colour(label), markersize=4, markeredgewidth=0)
        axes.plot([median(values)], [at], "|", color=colour(label), markersize=13, markeredgewidth=2)
        ratio = f" x{spread(ratios(baseline, by_seed))}" if baseline else ""
        axes.text(1, at, ratio, transform=axes.get_yaxis_transform(), fontsize=6, va="center")
    every = [value for by_seed in labels.values() for value in by_seed.values()]
    if max(every) > WIDE * min(every):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="x", color="0.9")
    axes.set_title(panel, fontsize=9)
    axes.tick_params(axis="x", labelsize=7, which="both")
