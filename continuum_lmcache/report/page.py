"""`continuum-lmcache report`: one self-contained HTML page on one recorded run, or on two."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from continuum_lmcache.errors import ConfigError
from continuum_lmcache.recordings.figures import figures, summary
from continuum_lmcache.recordings.reader import Recording

try:
    from plotly.graph_objects import Figure
    from plotly.offline import get_plotlyjs

    from continuum_lmcache.report import charts
except ModuleNotFoundError as missing:
    raise ConfigError(
        f"{missing.name} is not installed; pip install 'continuum-lmcache[report]', or take --json"
    ) from missing

# the page may run its own scripts and nothing else: no network, whatever plotly.js requests
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1240px; padding: 0 1em }
h1 { font-size: 1.5em } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
td, th { padding: .15em 1em; border-bottom: 1px solid #ddd; text-align: right }
td:first-child { text-align: left } .small { color: #555; font-size: .9em }
"""
CONFIG = {"displayModeBar": False, "scrollZoom": True, "responsive": True, "doubleClick": "reset"}


def page(runs: Sequence[Recording]) -> str:
    """The page. It has ids, tool names, counts and times: a recording has no prompt."""
    letters = charts.LETTERS[: len(runs)]
    names = [f"<b>{letter}</b> {html.escape(run.name)}" for letter, run in zip(letters, runs, strict=True)]
    title = html.escape(" against ".join(run.name for run in runs))
    said = [f"<p>{name}: {html.escape(summary(run))}</p>" for name, run in zip(names, runs, strict=True)]
    body = "\n".join(
        [
            f"<h1>{title}</h1>",
            *said,
            *timelines(runs),
            div(charts.first_tokens(runs), "first-tokens"),
            div(charts.prompt_sources(runs), "sources"),
            table(letters, [dict(rows(figures(run))) for run in runs]),
        ]
    )
    return (
        "<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n<script>{get_plotlyjs()}</script>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def timelines(runs: Sequence[Recording]) -> Iterator[str]:
    """One timeline per run, on the same time axis."""
    until_s = max(run.end_s - run.start_s for run in runs)
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


def rows(found: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The figures with their whole names: "job_time_s, mean"."""
    for name, value in found.items():
        if isinstance(value, Mapping):
            yield from rows(value, f"{above}{name}, ")
        else:
            yield f"{above}{name}", value


def table(letters: Sequence[str], runs: Sequence[Mapping[str, Any]]) -> str:
    """Every figure, one column per run. Text is escaped."""
    lines = ["".join(f"<th>{head}</th>" for head in ("", *letters))]
    for name in dict.fromkeys(name for run in runs for name in run):
        cells = (name, *(shown(run.get(name)) for run in runs))
        lines.append("".join(f"<td>{html.escape(cell)}</td>" for cell in cells))
    inside = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<details open><summary>All figures</summary><table>{inside}</table></details>"


def shown(value: Any) -> str:
    """Counts as integers, other numbers to four digits, unknown ones as a dash."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
