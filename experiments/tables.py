"""Compare replays: a table, a CSV and a figure from their summaries.

    python -m experiments.tables results/*.json --markdown --figure results/comparison

The first label given is the baseline. Where a label has several seeds, a cell is the median with its
range, and the ratio to the baseline is taken seed by seed (same programs, same arrivals), then its
median and range. A seed without a baseline is in no ratio.
"""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from experiments.summary import SCHEMA

Summary = dict[str, Any]
SOURCES = {
    "gpu": "GPU",
    "dram": "DRAM",
    "ssd": "disk",
    "offload": "LMCache",
    "again": "computed again",
    "computed": "new",
}
WIDTH = 180  # of tables, wherever they are printed
PINS = ("taken", "reused", "expired", "reclaimed")


class SummaryError(ValueError):
    """A summary file does not have its schema."""


def at(*path: str) -> Callable[[Summary], float | None]:
    """A reader of one figure, None where a summary has none."""

    def read(summary: Summary) -> float | None:
        found: Any = summary
        for name in path:
            found = found.get(name) if isinstance(found, dict) else None
        return None if found is None else float(found)

    return read


Rows = dict[str, Callable[[Summary], float | None]]
ROWS: Rows = {
    "job time mean, s": at("job_time_s", "mean"),
    "job time P50, s": at("job_time_s", "p50"),
    "job time P95, s": at("job_time_s", "p95"),
    "TTFT mean, s": at("ttft_s", "mean"),
    "TTFT P99, s": at("ttft_s", "p99"),
    "TTFT max, s": at("ttft_s", "max"),
    **{
        f"first token of a {turn} turn, {words}, s": at(f"{turn}_ttft_s", name)
        for turn in ("first", "later")
        for words, name in (("median", "p50"), ("longest", "max"))
    },
    "jobs/s": at("jobs_per_s"),
    "output tokens/s": at("output_tokens_per_s"),
    "wall, s": at("wall_s"),
    **{f"prompt tokens: {words}": at("tokens_by_source", name) for name, words in SOURCES.items()},
    **{f"pins {name}": at("pins", name) for name in PINS},
    "preemptions": at("server", "vllm:num_preemptions_total"),
    "KV usage at the end": at("server", "vllm:kv_cache_usage_perc"),
    "failed turns": at("errors"),
}
RATIO = "job time mean, baseline / this"


def load(paths: Iterable[Path]) -> dict[str, list[Summary]]:
    """Summaries by label, in the order of the paths. Raises SummaryError."""
    found: dict[str, list[Summary]] = {}
    for path in paths:
        try:
            summary = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise SummaryError(f"{path}: not a summary: {error}") from error
        if not isinstance(summary, dict) or summary.get("schema") != SCHEMA:
            raise SummaryError(f"{path}: not a summary of schema {SCHEMA}; replay writes LABEL-seedN.json")
        found.setdefault(summary["label"], []).append(summary)
    if not found:
        raise SummaryError("no summary given")
    return found


def spread(values: Sequence[float]) -> str:
    """The median, and the range where there are several; "" for none."""
    if not values:
        return ""
    middle = shown(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({shown(min(values))}..{shown(max(values))})"


def shown(value: float) -> str:
    """Three digits below 100, integers above."""
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 1 else f"{value:.3f}"


def ratios(baseline: Sequence[Summary], other: Sequence[Summary]) -> list[float]:
    """Mean job time of the baseline over the other's, for each seed that both ran."""
    mean = at("job_time_s", "mean")
    before = {summary["seed"]: mean(summary) for summary in baseline}
    pairs = ((before.get(summary["seed"]), mean(summary)) for summary in other)
    return [was / now for was, now in pairs if was and now]


def comparison(runs: dict[str, list[Summary]], shows: Rows = ROWS) -> list[list[str]]:
    """The table: a header, then a row per figure that any run has, a column per label."""
    labels = list(runs)
    rows = [["", *labels]]
    for name, read in shows.items():
        cells = [[v for s in runs[label] if (v := read(s)) is not None] for label in labels]
        if any(cells):
            rows.append([name, *map(spread, cells)])
    if len(labels) > 1:
        rows.append([RATIO, *(spread(ratios(runs[labels[0]], runs[label])) for label in labels)])
    return rows


def caption(runs: dict[str, list[Summary]]) -> str:
    """The conditions of the runs."""
    every = [summary for summaries in runs.values() for summary in summaries]
    sets = {(s["workload"], s["programs"], s["jps"], s["time_scale"]) for s in every}
    seeds = ", ".join(map(str, sorted({s["seed"] for s in every})))
    words = (
        f"{workload}: {programs} programs, {'own arrivals' if jps is None else f'{jps:.3g} a second'}, "
        f"gaps x {scale:.3g}"
        for workload, programs, jps, scale in sorted(sets, key=str)
    )
    return "; ".join(words) + f"; seeds {seeds}"


def markdown(rows: Sequence[Sequence[str]], others: str = "---:") -> str:
    """The table in GitHub's notation; `others` aligns all columns but the first."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" + f"|{others}" * (len(rows[0]) - 1) + "|", *lines[1:]])


def between(page: str, marks: tuple[str, str], text: str) -> str:
    """The page with `text` between its two marks. Raises ValueError where it lacks them."""
    before, start, rest = page.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not (start and end):
        raise ValueError(f"a page has no lines {marks[0]} and {marks[1]}")
    return f"{before}{start}\n{text.rstrip()}\n{end}{after}"


def write_lines(lines: Sequence[Sequence[Any]], path: Path) -> None:
    """The table as CSV."""
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(lines)


def plain(rows: Sequence[Sequence[str]], title: str) -> Table:
    """The table for a terminal."""
    table = Table(title=title, title_justify="left")
    for index, heading in enumerate(rows[0]):
        table.add_column(heading, justify="right" if index else "left")
    for row in rows[1:]:
        table.add_row(*row)
    return table


def publish(lines: Sequence[Sequence[str]], title: str, words: Sequence[str], path: Path) -> None:
    """Print the table with some lines of text, and write both at `path` as .md, the table as .csv too."""
    Console(width=WIDTH).print(plain(lines, title), *words, "", sep="\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".md").write_text("\n".join([title, "", *words, "", markdown(lines), ""]))
    write_lines(lines, path.with_suffix(".csv"))


def write_csv(runs: dict[str, list[Summary]], path: Path, shows: Rows = ROWS) -> None:
    """Every figure of every run, one run a line."""
    every = [(label, summary) for label, summaries in runs.items() for summary in summaries]
    lines = [[label, s["seed"], *(read(s) for read in shows.values())] for label, s in every]
    write_lines([["label", "seed", *shows], *lines], path)


def main(
    summaries: Annotated[list[Path], typer.Argument(help="Summary JSONs, the baseline's first.")],
    as_markdown: Annotated[bool, typer.Option("--markdown", help="GitHub's notation.")] = False,
    table: Annotated[Path | None, typer.Option(help="Also write every run's figures as CSV.")] = None,
    figure: Annotated[Path | None, typer.Option(help="Also draw PNG and SVG of this name.")] = None,
) -> None:
    """Compare replays."""
    try:
        runs = load(summaries)
    except SummaryError as error:
        raise SystemExit(f"tables: {error}") from error
    rows = comparison(runs)
    if as_markdown:
        print(f"{caption(runs)}\n\n{markdown(rows)}")
    else:
        Console().print(plain(rows, caption(runs)))
    if table is not None:
        write_csv(runs, table)
    if figure is not None:
        from experiments.figures import draw  # matplotlib takes a second to import

        draw(runs, figure)


if __name__ == "__main__":
    typer.run(main)
