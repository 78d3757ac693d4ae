"""Predicted against measured: a table by contender, the ranking, and a CSV."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from experiments.tables import spread

Row = dict[str, Any]
COLUMNS = (
    *("label", "seed", "programs", "way", "mean_s", "p95_s", "gpu_share", "offload_share"),
    *("computed_share", "slower", "hop_s", "hop_per_token_s", "step_s", "per_sequence_s"),
)
MEASURED = "measured"
SHARES = ("gpu_share", "offload_share", "computed_share")


def of(rows: Sequence[Row], label: str, way: str) -> dict[int, Row]:
    """By seed."""
    return {row["seed"]: row for row in rows if (row["label"], row["way"]) == (label, way)}


def comparison(rows: Sequence[Row]) -> list[list[str]]:
    """A header, then a line per contender and way; ratios are predicted / measured, seed by seed."""
    lines = [["", "", "mean job, s", "/ measured", "P95, s", "/ measured", "GPU / LMCache / computed"]]
    for label in dict.fromkeys(row["label"] for row in rows):
        before = of(rows, label, MEASURED)
        for way in dict.fromkeys(row["way"] for row in rows):
            mine = of(rows, label, way)
            cells = []
            for figure in ("mean_s", "p95_s"):
                ratios = [mine[seed][figure] / before[seed][figure] for seed in mine]
                cells += [spread([row[figure] for row in mine.values()])]
                cells += [spread(ratios) if way != MEASURED else ""]
            shares = " / ".join(f"{100 * median(r[s] for r in mine.values()):.0f} %" for s in SHARES)
            lines.append([label, way, *cells, shares])
    return lines


def ranking(rows: Sequence[Row]) -> str:
    """In how many seeds the simulator gives the contenders the measured order of mean job times."""
    seeds = sorted({row["seed"] for row in rows})
    ways = [way for way in dict.fromkeys(row["way"] for row in rows) if way != MEASURED]
    orders = {(way, seed): order(rows, way, seed) for way in (MEASURED, *ways) for seed in seeds}
    same = {way: sum(orders[way, seed] == orders[MEASURED, seed] for seed in seeds) for way in ways}
    lines = (f"{way}: the measured order in {n} of {len(seeds)} seeds" for way, n in same.items())
    return "Ranking by mean job time. " + "; ".join(lines)


def order(rows: Sequence[Row], way: str, seed: int) -> list[str]:
    """Contenders, fastest first."""
    mine = [row for row in rows if row["way"] == way and row["seed"] == seed]
    return [row["label"] for row in sorted(mine, key=lambda row: float(row["mean_s"]))]


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Every figure of every run."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
