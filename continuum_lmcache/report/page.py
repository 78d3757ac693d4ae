"""`continuum-lmcache report`: one self-contained HTML page on one recorded run, or on two."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from pathlib import Path

from continuum_lmcache.errors import ConfigError
from continuum_lmcache.recordings.metrics import losses, losses_by_cause, measure, percentile
from continuum_lmcache.recordings.program_history import RecordedLoss
from continuum_lmcache.recordings.reader import Recording, load

try:
    from plotly.graph_objects import Figure
    from plotly.offline import get_plotlyjs

    from continuum_lmcache.report import charts
except ModuleNotFoundError as missing:
    raise ConfigError(
        f"{missing.name} is not installed; pip install 'continuum-lmcache[report]'"
    ) from missing

# the page may run its own scripts and nothing else: no network, whatever plotly.js requests
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1240px; padding: 0 1em }
h1 { font-size: 1.5em } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
td, th { padding: .15em 1em; border-bottom: 1px solid #ddd; text-align: right }
td:first-child { text-align: left }
.pair { display: grid; grid-template-columns: 1fr 1fr } .pair > div { min-width: 0; overflow: hidden }
li, .small { color: #555; font-size: .9em }
"""
MOST_LOSSES = 50
LOSS_HEADS = (
    "program",
    "turn",
    "cause",
    "at token",
    "of",
    "tokens again",
    "prefill [s]",
    "then / now (text, else hashes)",
)
CONFIG = {"displaylogo": False, "scrollZoom": True, "responsive": True, "doubleClick": "reset"}


def write_report(paths: Sequence[Path], out: Path) -> int:
    """Write the page on one or two recordings; returns its size in bytes. Raises TraceError."""
    text = page([load(path) for path in paths]).encode()
    out.write_bytes(text)
    return len(text)


def page(runs: Sequence[Recording]) -> str:
    """The page. It has only ids, tool names, counts and times: a recording has no prompt."""
    names = " against ".join(html.escape(run.name) for run in runs)
    body = "\n".join(
        [
            f"<h1>{names}</h1>",
            table(runs),
            *timelines(runs),
            div(charts.distributions(runs), "distributions"),
            pair(div(charts.ttl_against_gap(runs), "ttl"), div(charts.gaps_by_tool(runs), "gaps")),
            pair(div(charts.tier_split(runs), "tiers"), div(charts.pin_outcomes(runs), "outcomes")),
            div(charts.predictions(runs), "predictions"),
            *map(lost, runs),
            notes(runs),
        ]
    )
    return (
        "<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f"<title>{names}</title>\n<style>{STYLE}</style>\n<script>{get_plotlyjs()}</script>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def timelines(runs: Sequence[Recording]) -> Iterator[str]:
    """One timeline per run, on the same time axis."""
    until_s = max(run.end_s - run.programs[0].turns[0].arrival_s for run in runs)
    for letter, run in zip(charts.LETTERS, runs, strict=False):
        yield div(charts.timeline(run, letter, until_s), f"timeline-{letter}")
    yield (
        "<p class='small'>Drag to zoom, scroll over an axis, double click to see all. A pin is the thin bar "
        "over the tool's time. A load is a mark.</p>"
    )


def div(figure: Figure, name: str) -> str:
    """One figure, with its name as id."""
    found: str = figure.to_html(full_html=False, include_plotlyjs=False, div_id=name, config=CONFIG)
    return found


def pair(left: str, right: str) -> str:
    return f"<div class='pair'><div>{left}</div><div>{right}</div></div>"


def table(runs: Sequence[Recording]) -> str:
    """The figures, one column per run, and for two runs the second over the first."""
    both = len(runs) == 2
    heads = ["", *charts.LETTERS[: len(runs)], *(["B / A"] if both else [])]
    names = [f"<b>{a}</b> {html.escape(run.name)}" for a, run in zip(charts.LETTERS, runs, strict=False)]
    measured = [measure(run) for run in runs]
    lines = []
    for label in measured[0]:
        values = [found[label] for found in measured]
        first, last = values[0], values[-1]
        ratio = [last / first if first and last is not None else None] if both else []
        lines.append((label, *values, *ratio))
    figures = f"<details><summary>Figures</summary>{rows(heads, lines)}</details>"
    return f"<p>{'<br>'.join(names)}</p>{figures}"


def lost(run: Recording) -> str:
    """What a run's returns computed again: one row per cause, and the most expensive one by one."""
    causes = losses_by_cause(run)
    if not causes:
        return ""
    summary = [
        (cause, len(found), *sums(found), percentile([loss.at_token for loss in found], 50))
        for cause, found in causes.items()
    ]
    single = [
        (p.id, p.turns.index(turn) + 1, loss.cause, loss.at_token, loss.left_tokens)
        + (loss.tokens, loss.prefill_s, " / ".join(loss.sides))
        for p, turn, loss in losses(run)[:MOST_LOSSES]
    ]
    return (
        f"<details id='losses'><summary>{html.escape(run.name)}: what returns computed again</summary>"
        + rows(("cause", "returns", "tokens", "prefill [s]", "at token, median"), summary)
        + rows(LOSS_HEADS, single)
        + "</details>"
    )


def sums(found: Sequence[RecordedLoss]) -> tuple[int, float]:
    """Tokens and seconds."""
    return sum(loss.tokens for loss in found), sum(loss.prefill_s for loss in found)


def rows(heads: Sequence[str], cells: Sequence[Sequence[object]]) -> str:
    """A table; text is escaped."""
    lines = ["".join(f"<th>{head}</th>" for head in heads)]
    for line in cells:
        texts = (html.escape(cell) if isinstance(cell, str) else shown(cell) for cell in line)  # type: ignore[arg-type]
        lines.append("".join(f"<td>{text}</td>" for text in texts))
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def shown(value: float | None) -> str:
    """Counts as integers, other numbers to four digits, unknown ones as a dash."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def notes(runs: Sequence[Recording]) -> str:
    """What the recordings lack."""
    lines = [f"<li>{html.escape(f'{run.name}: {note}')}</li>" for run in runs for note in run.notes]
    return f"<ul>{''.join(lines)}</ul>" if lines else ""
