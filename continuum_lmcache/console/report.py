"""`continuum-lmcache report`: what happened in a recorded run, or in two, side by side."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from continuum_lmcache.console.doctor_output import headed
from continuum_lmcache.recordings.figures import figures, summary
from continuum_lmcache.recordings.reader import RecordedProgram, Recording

STATES = {  # of a program: how it is drawn, and in which style; where several fall into a column, the last
    "tool": ("·", "dim"),
    "pinned": ("=", "green"),
    "queued": ("?", "yellow"),
    "running": ("#", "blue"),
    "loading": ("<", "red"),
}
LETTERS = "AB"
PROGRAMS_SHOWN = 300
NAME_CHARS = 24
PAGE_CHARS = 200  # the width of a page


def states(program: RecordedProgram, end_s: float) -> Iterator[tuple[str, float, float]]:
    """A program's states with their times on the wall clock; those open at the end last until `end_s`.

    A pin overlaps its tool's time. A load has no length: how long it took is not recorded.
    """
    for turn in program.turns:
        gone_s = end_s if turn.departure_s is None else turn.departure_s
        started_s = gone_s if turn.started_s is None else turn.started_s
        yield "queued", turn.arrival_s, started_s
        if turn.started_s is not None:
            yield "running", started_s, gone_s
            if turn.sources["DRAM"] or turn.sources["disk"]:
                yield "loading", started_s, started_s
        if turn.gap_s is not None:
            yield "tool", gone_s, gone_s + turn.gap_s
    for pin in program.pins:
        yield "pinned", pin.taken_s, end_s if pin.ended_s is None else pin.ended_s


def drawn(program: RecordedProgram, run: Recording, until_s: float, columns: int) -> Text:
    """A program's states, a column for each part of the time from the run's first arrival to `until_s`."""
    marks = [""] * columns
    order = list(STATES)
    for state, *times_s in sorted(states(program, run.end_s), key=lambda each: order.index(each[0])):
        first, last = (int((at_s - run.start_s) / (until_s or 1.0) * columns) for at_s in times_s)
        for column in range(first, max(last, first + 1)):
            marks[min(column, columns - 1)] = state
    return Text.assemble(*(STATES[state] if state else " " for state in marks))


def plain(text: str) -> str:
    """A client's text for the terminal: printable, and of limited length."""
    clean = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return clean if len(clean) <= NAME_CHARS else clean[: NAME_CHARS - 1] + "…"


def rows(found: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """The figures with their whole names: "job_time_s, mean". Unknown ones are a dash."""
    for name, value in found.items():
        if isinstance(value, Mapping):
            yield from rows(value, f"{above}{name}, ")
        else:
            shown = f"{value:,.4g}" if isinstance(value, float) else "-" if value is None else str(value)
            yield f"{above}{name}", shown


def show(runs: Sequence[Recording], console: Console) -> None:
    """The summaries, what each program was doing, and all figures."""
    columns = max(20, console.width - NAME_CHARS - 1)  # of the picture
    until_s = max(run.end_s - run.start_s for run in runs)
    for letter, run in zip(LETTERS, runs, strict=False):
        console.print(Text(f"{letter}  {run.name}: {summary(run)}\n"), soft_wrap=True)
        for program in run.programs[:PROGRAMS_SHOWN]:
            label = Text(f"{plain(program.id):{NAME_CHARS}} ")
            console.print(label + drawn(program, run, until_s, columns), no_wrap=True, crop=True)
        rest = len(run.programs) - PROGRAMS_SHOWN
        legend = ", ".join(f"{mark} {state}" for state, (mark, _) in STATES.items())
        more = f"; {rest} programs more" if rest > 0 else ""
        console.print(Text(f"0 to {until_s:,.0f} s: {legend}{more}\n"), soft_wrap=True)
    found = [dict(rows(figures(run))) for run in runs]
    table = headed("", *LETTERS[: len(runs)])
    for name in dict.fromkeys(name for each in found for name in each):
        table.add_row(Text(name), *(Text(each.get(name, "-")) for each in found))
    console.print(table)


def write_page(runs: Sequence[Recording], path: Path) -> None:
    """What `show` shows as one HTML page, without scripts or links. Raises OSError."""
    console = Console(record=True, width=PAGE_CHARS, file=io.StringIO(), force_terminal=True)
    show(runs, console)
    path.write_text(console.export_html(), encoding="utf-8")
