"""Prints the figures of one recorded run or of two side by side, or converts a run into a trace to replay it.

    python -m experiments.analyze report run/ --figure run/analysis
    python -m experiments.analyze report --compare run-fcfs/ run-continuum/
    python -m experiments.analyze convert run/ trace.jsonl

A recording is a file `scheduler_timestamps`, or a directory with one of
every rank. The public prototype's files are read too: missing data is reported, not guessed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import matplotlib
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python PATH` as well as -m

from continuum_lmcache.errors import TraceError
from continuum_lmcache.recordings.metrics import (
    CalibrationBin,
    calibration,
    jct_s,
    measure,
    outcomes,
    percentile,
    sources,
    tools,
    waits_s,
)
from continuum_lmcache.recordings.reader import Recording, load
from experiments.recorded_runs import forecast_errors, to_trace

matplotlib.use("Agg")  # no display
matplotlib.rcParams["svg.hashsalt"] = "continuum"  # the same recording gives the same file
from matplotlib import pyplot as plt  # noqa: E402 (after the backend is chosen)
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.ticker import EngFormatter  # noqa: E402

LETTERS = ("A", "B")
LINES, MARKS, SHADES = ("-", "--"), ("o", "^"), ("0.1", "0.5")  # told apart without colour
FILLS = (
    ("0.92", ""),
    ("0.78", "//"),
    ("0.62", "xx"),
    ("0.3", ""),
    ("1.0", ".."),
    ("0.5", "\\\\"),
    ("0.8", "--"),
)
TOOLS_SHOWN = 15

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


@app.command()
def report(
    recording: Annotated[Path | None, typer.Argument(help="file or directory")] = None,
    compare: Annotated[tuple[Path, Path] | None, typer.Option(help="two recordings side by side")] = None,
    figure: Annotated[Path | None, typer.Option(help="draw here: .png and .svg are added")] = None,
) -> None:
    """Print a run's figures, or two runs' side by side; draw them too."""
    paths = list(compare or ([recording] if recording else []))
    if not paths or (compare and recording):
        raise typer.BadParameter("name one recording, or two with --compare")
    console = Console()
    runs = [opened(path) for path in paths]
    for table in tables(runs):
        console.print(table)
    for run in runs:
        for note in run.notes:
            console.print(Text(f"{run.name}: {note}"), soft_wrap=True)
    if figure:
        for target in draw(runs, figure):
            console.print(f"wrote {target}", soft_wrap=True, highlight=False)


@app.command()
def convert(recording: Path, trace: Path) -> None:
    """Write the recorded programs as a trace, so that the run can be replayed."""
    try:
        programs = to_trace(load(recording))
    except (TraceError, OSError) as error:
        raise refusal(error) from error
    trace.write_text("".join(json.dumps(program) + "\n" for program in programs), encoding="ascii")
    turns = sum(len(program["turns"]) for program in programs)
    print(f"wrote {trace}: {len(programs)} programs, {turns} turns")


def opened(path: Path) -> Recording:
    try:
        return load(path)
    except (TraceError, OSError) as error:
        raise refusal(error) from error


def refusal(error: Exception) -> typer.Exit:
    """One line with the problem, and its exit status."""
    print(f"error: {error}", file=sys.stderr)
    return typer.Exit(1)


def tables(runs: Sequence[Recording]) -> list[Table]:
    """The comparison, then each run's pins, tools, calibration and reloads."""
    found = [comparison(runs)]
    for run in runs:
        made = (pin_table(run), tool_table(run), calibration_table(run), reload_table(run))
        found += [table for table in made if table.rows]
    return found


def comparison(runs: Sequence[Recording]) -> Table:
    """One column a run and, for two, the second over the first."""
    ratio = ["second / first"] if len(runs) == 2 else []
    table = titled("Run", "", *[run.name for run in runs], *ratio)
    measured = [measure(run) for run in runs]
    for label in measured[0]:
        values = [found[label] for found in measured]
        first, last = values[0], values[-1]
        quotient = [shown(last / first if first and last is not None else None)] if ratio else []
        table.add_row(Text(label), *map(shown, values), *quotient)
    return table


def pin_table(run: Recording) -> Table:
    """How pins ended."""
    table = titled(f"Pins by outcome: {run.name}", "outcome", "pins", "mean held [s]", "sum held [s]")
    for outcome, held_s in outcomes(run).items():
        table.add_row(printable(outcome), shown(len(held_s)), shown(fmean(held_s)), shown(sum(held_s)))
    return table


def tool_table(run: Recording) -> Table:
    """The called tools, their durations, and the TTLs."""
    heads = ("command", "turns", "gap, median [s]", "gap, P95 [s]", "TTL, median [s]", "TTL = 0")
    table = titled(f"Tools: {run.name}", *heads)
    for name, turns in list(tools(run).items())[:TOOLS_SHOWN]:
        gaps_s = [t.gap_s for t in turns if t.gap_s is not None]
        ttls_s = [t.retention["ttl_s"] for t in turns if t.retention]
        zero = f"{sum(ttl == 0 for ttl in ttls_s) / len(ttls_s):.0%}" if ttls_s else "-"
        spreads = (percentile(gaps_s, 50), percentile(gaps_s, 95), percentile(ttls_s, 50))
        table.add_row(printable(name), shown(len(turns)), *map(shown, spreads), zero)
    return table


def calibration_table(run: Recording) -> Table:
    """Predicted and realised P(tau)."""
    heads = ("promised P(tau)", "realised", "promises", "censored")
    table = titled(f"Calibration: {run.name}", *heads)
    for found in calibration(run):
        table.add_row(*map(shown, (found.promised, found.realised, found.promises, found.censored)))
    return table


def reload_table(run: Recording) -> Table:
    """Predicted and measured PrefillReload."""
    heads = ("context back on the GPU", "returns", "predicted, median [s]", "took, median [s]")
    table = titled(f"Reload: {run.name}", *heads, "error, median", "error, P90")
    for name, found in forecast_errors(run).items():
        errors = [f"{error:.0%}" if error is not None else "-" for error in (found.median, found.p90)]
        table.add_row(name, shown(found.reloads), shown(found.predicted_s), shown(found.took_s), *errors)
    return table


def titled(title: str, *heads: str) -> Table:
    table = Table(title=Text(title), title_justify="left")
    for index, head in enumerate(heads):
        table.add_column(Text(head), justify="right" if index else "left", overflow="fold")
    return table


def shown(value: float | None) -> str:
    """Counts as integers, other numbers to four digits, unknown ones as a dash."""
    if value is None:
        return "-"
    return (
        f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    )


def printable(name: str) -> Text:
    """A client's text, without control characters for a terminal."""
    return Text("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name))


def draw(runs: Sequence[Recording], path: Path) -> list[Path]:
    """Write PNG and SVG at `path` (endings are added) and return them."""
    canvas, ((jct, wait, pin), (tokens, ends, honest)) = plt.subplots(
        2, 3, figsize=(13, 7.5), layout="constrained"
    )
    draw_shares(jct, "JCT", [[jct_s(p) for p in run.programs if p.complete] for run in runs])
    draw_shares(wait, "queue wait", [list(waits_s(run.turns)) for run in runs])
    draw_shares(pin, "pin time", [[s for held_s in outcomes(run).values() for s in held_s] for run in runs])
    draw_stacks(tokens, "prompt tokens by source", [sources(run.turns) for run in runs])
    draw_stacks(ends, "pins by outcome", [{k: len(v) for k, v in outcomes(run).items()} for run in runs])
    draw_calibration(honest, [calibration(run) for run in runs])
    for axes in (tokens, ends):
        axes.set_xticks(range(len(runs)), LETTERS[: len(runs)])
    names = [f"{letter}  {run.name}" for letter, run in zip(LETTERS, runs, strict=False)]
    canvas.suptitle("\n".join(names), fontsize=9, parse_math=False)
    written = [path.with_name(path.name + ending) for ending in (".png", ".svg")]
    for target in written:
        canvas.savefig(target, dpi=150, metadata={"Date": None} if target.suffix == ".svg" else None)
    plt.close(canvas)
    return written


def draw_shares(axes: Axes, title: str, runs_s: Sequence[Sequence[float]]) -> None:
    """The share of cases within a time, a line a run."""
    for letter, line, shade, values_s in zip(LETTERS, LINES, SHADES, runs_s, strict=False):
        if values_s:
            axes.ecdf(values_s, label=letter, linestyle=line, color=shade, linewidth=2)
    axes.set(title=title, xlabel="seconds", ylabel="share within", xlim=(0, None))
    legend(axes)


def draw_stacks(axes: Axes, title: str, runs: Sequence[Mapping[str, int]]) -> None:
    """The parts of a total, one bar per run."""
    bottoms = [0] * len(runs)
    for index, part in enumerate(dict.fromkeys(part for run in runs for part in run)):
        heights = [run.get(part, 0) for run in runs]
        shade, hatch = FILLS[index % len(FILLS)]
        axes.bar(
            range(len(runs)), heights, bottom=bottoms, label=part, color=shade, hatch=hatch, edgecolor="black"
        )
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set(title=title)
    axes.margins(y=0.3)  # room for the legend
    axes.yaxis.set_major_formatter(EngFormatter())
    legend(axes, loc="upper center", ncols=2)


def draw_calibration(axes: Axes, runs: Sequence[Sequence[CalibrationBin]]) -> None:
    """Realised over promised P(tau); on the diagonal they are equal. A mark grows with its predictions."""
    axes.fill_between((0, 1), (-0.1, 0.9), (0.1, 1.1), color="0.9", label="within 0.1")
    axes.plot((0, 1), (0, 1), color="0.6", linewidth=1)
    for letter, mark, shade, bins in zip(LETTERS, MARKS, SHADES, runs, strict=False):
        known = [(b.promised, b.realised, b.promises) for b in bins if b.realised is not None]
        if known:
            promised, realised, weights = zip(*known, strict=True)
            sizes = [20 + 200 * weight / max(weights) for weight in weights]
            axes.scatter(
                promised, realised, s=sizes, marker=mark, facecolor="none", edgecolor=shade, label=letter
            )
    axes.set(title="calibration", xlabel="promised P(tau)", ylabel="realised", xlim=(0, 1), ylim=(0, 1))
    legend(axes)


def legend(axes: Axes, **where: Any) -> None:
    """A legend, or a text if there is no data."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, **where)
    else:
        axes.text(0.5, 0.5, "not recorded", ha="center", transform=axes.transAxes)


if __name__ == "__main__":
    app()
