"""Prints the figures of one recorded run or of two side by side, or converts a run into a trace to replay it.

    python -m experiments.analyze report run/
    python -m experiments.analyze report --compare run-fcfs/ run-continuum/
    python -m experiments.analyze convert run/ trace.jsonl

A recording is a file `scheduler_timestamps`, or a directory with one of
every rank. The public prototype's files are read too: missing data is reported, not guessed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python PATH` as well as -m

from continuum_lmcache.errors import TraceError
from continuum_lmcache.recordings.metrics import calibration, measure, outcomes, percentile, tools
from continuum_lmcache.recordings.reader import Recording, load
from experiments.recorded_runs import to_trace

TOOLS_SHOWN = 15

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


@app.command()
def report(
    recording: Annotated[Path | None, typer.Argument(help="file or directory")] = None,
    compare: Annotated[tuple[Path, Path] | None, typer.Option(help="two recordings side by side")] = None,
) -> None:
    """Print a run's figures, or two runs' side by side."""
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
    """The comparison, then each run's pins, tools and calibration."""
    found = [comparison(runs)]
    for run in runs:
        made = (pin_table(run), tool_table(run), calibration_table(run))
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
    heads = ("predicted P(tau)", "realised", "predictions", "censored")
    table = titled(f"Calibration: {run.name}", *heads)
    for found in calibration(run):
        table.add_row(*map(shown, (found.predicted, found.realised, found.predictions, found.censored)))
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


if __name__ == "__main__":
    app()
