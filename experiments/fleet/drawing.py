"""The fleet's figures, as PNG and SVG. Routers differ by symbol and position, not by colour."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from textwrap import fill

import numpy as np
from matplotlib.figure import Figure

from experiments.fleet.plans import HOT, PEER_GBPS, Section, at, cases
from experiments.fleet.report import conditions, grouped, of
from experiments.fleet.run import FleetResult
from experiments.sweep.cases import STOCK, FleetPoint
from experiments.sweep.drawing import plt, readable, save
from experiments.sweep.goals import OURS
from experiments.sweep.grids import Size
from experiments.sweep.readout import found
from experiments.sweep.rows import Rows

MARKS = dict(
    zip(
        ("round-robin", "least", "lmetric", "hits-load", "hash", "sticky", "ear-affinity", "ear"),
        "1234xsvd",
        strict=True,
    )
) | {
    "program-sched": "p",
    "fleet-affinity": "o",
    "fleet": "*",
}
COLUMNS = 3
TIMELINE_ROUTERS = ("ear", "fleet")


def draw_jobs(rows: Rows, section: Section, size: Size, seeds: Sequence[int], path: Path) -> None:
    """Mean job time by router: a panel per load and engine, a dot per seed, a bar at their median."""
    pairs = found(rows, cases(section, size, seeds))
    laid = grouped(section, pairs)
    columns = min(COLUMNS, len(laid))
    lines = -(-len(laid) // columns)
    most = max(len(labels) for labels in laid.values())
    figure, grid = plt.subplots(
        lines,
        columns,
        figsize=(4.2 * columns, 0.9 + lines * (0.9 + 0.22 * most)),
        layout="constrained",
        squeeze=False,
    )
    for axes in grid.flat[len(laid) :]:
        axes.set_axis_off()
    for axes, (panel, labels) in zip(grid.flat, laid.items(), strict=False):
        for place, those in enumerate(labels.values()):
            values = list(of(those, "job_mean_s").values())
            axes.plot(values, [place] * len(values), "o", color="0.55", markersize=4, markeredgewidth=0)
            axes.plot([median(values)], [place], "|", color="black", markersize=12, markeredgewidth=2)
        axes.set_yticks(range(len(labels)), labels, fontsize=7)
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.grid(axis="x", color="0.9")
        axes.set_xlim(left=0)
        axes.set_title(panel, fontsize=8)
        axes.tick_params(axis="x", labelsize=7)
        axes.set_xlabel("mean job time, s; dot: a seed, bar: median", fontsize=7)
    titled(figure, section.title, conditions(pairs))
    save(figure, path)


def draw_coupling(rows: Rows, section: Section, size: Size, seeds: Sequence[int], path: Path) -> None:
    """Wall time over trace time against the mean time of a turn: a symbol per router, a point per run."""
    pairs = found(rows, cases(section, size, seeds))
    figure, panels = plt.subplots(1, 2, figsize=(10, 4.6), layout="constrained", sharey=True)
    for axes, engine in zip(panels, (STOCK, OURS), strict=True):
        for router, mark in MARKS.items():
            those = [
                r for c, r in pairs if isinstance(c, FleetPoint) and (c.router, c.engine) == (router, engine)
            ]
            if those:
                x, y = ([float(row[name]) for row in those] for name in ("e2e_mean_s", "amplification"))
                axes.plot(x, y, mark, color="black", fillstyle="none", markersize=7, label=router, alpha=0.8)
        axes.set(xscale="log", xlabel="mean turn, s", title=engine)
        readable(axes.xaxis)
        axes.set_ylabel("makespan / makespan if each program were alone")
        axes.grid(color="0.9", which="both")
        axes.legend(fontsize=7)
    titled(figure, "Dispatch coupling: slow turns stretch the run", conditions(pairs))
    save(figure, path)


def draw_balance(rows: Rows, section: Section, size: Size, seeds: Sequence[int], path: Path) -> None:
    """P90 of first tokens by replica: the median replica and the worst one, for each router."""
    pairs = found(rows, cases(section, size, seeds))
    laid = {
        panel: labels
        for panel, labels in grouped(section, pairs).items()
        if panel.startswith(f"{HOT[0]}, ") and f"rho {HOT[1]:g}" in panel or size is Size.QUICK
    }
    if not laid:
        return
    figure, panels = plt.subplots(
        1, len(laid), figsize=(4.6 * len(laid), 3.6), layout="constrained", squeeze=False
    )
    for axes, (panel, labels) in zip(panels.flat, laid.items(), strict=True):
        for place, those in enumerate(labels.values()):
            pair = [mean(of(those, f"ttft_p90_{which}_s").values()) for which in ("median", "max")]
            axes.plot(pair, [place, place], "-", color="0.7")
            axes.plot(pair[0], place, "o", color="black", fillstyle="none")
            axes.plot(pair[1], place, ">", color="black")
        axes.set_yticks(range(len(labels)), labels, fontsize=7)
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.set(xscale="log", title=panel)
        readable(axes.xaxis)
        axes.set_xlabel("P90 of TTFT, s: median replica (ring), worst (arrow); means over seeds", fontsize=7)
        axes.grid(axis="x", color="0.9", which="both")
    titled(figure, "Balance of replicas", conditions(pairs))
    save(figure, path)


def draw_timeline(runs: Iterable[tuple[FleetPoint, FleetResult]], path: Path) -> None:
    """Pending prefill tokens by replica over time, an arrow for each move."""
    shown = list(runs)
    figure, panels = plt.subplots(
        len(shown), 1, figsize=(10, 2.4 * len(shown)), layout="constrained", squeeze=False
    )
    for axes, (point, run) in zip(panels.flat, shown, strict=True):
        end_s = run.timeline[-1][0]
        pending = np.array([tokens for _, tokens in run.timeline]).T / 1000
        image = axes.imshow(
            pending,
            aspect="auto",
            origin="lower",
            cmap="Greys",
            extent=(0, end_s, -0.5, point.replicas - 0.5),
            vmin=0,
            vmax=100,
        )
        for move in run.moves:
            axes.annotate(
                "",
                (move.at_s, move.target),
                (move.at_s, move.source),
                arrowprops={"arrowstyle": "->", "lw": 0.7},
            )
        axes.set_yticks(range(point.replicas))
        axes.set(
            ylabel="replica", title=f"{point.router}, {point.engine}: {len(run.moves)} moves", xlabel="s"
        )
        figure.colorbar(image, ax=axes, label="pending, 1000 tokens", extend="max")
    first = shown[0][0]
    titled(
        figure,
        "Pending prefill, and moves",
        f"simulated: {first.workload}, rho {first.rho:g}, seed {first.seed}",
    )
    save(figure, path)


def timeline_points(size: Size, seed: int) -> list[FleetPoint]:
    """The runs that the timeline shows: stock engines, where moves can gain something."""
    return [
        replace(p, seed=seed, link_gbps=PEER_GBPS) for p in at(HOT, size, *TIMELINE_ROUTERS, engine=STOCK)
    ]


def titled(figure: Figure, title: str, words: str) -> None:
    """The title, and the conditions below it in lines that fit."""
    figure.suptitle(f"{title}\n{fill(words, width=round(16 * figure.get_figwidth()))}", fontsize=7)
