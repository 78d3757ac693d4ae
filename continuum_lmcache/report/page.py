"""`continuum-lmcache report`: one self-contained HTML page on one recorded run, or on two."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from continuum_lmcache.errors import ConfigError
from continuum_lmcache.recordings.figures import figures, summary
from continuum_lmcache.recordings.reader import Recording

try:
    from plotly.offline import get_plotlyjs

    from continuum_lmcache.report import charts
except ModuleNotFoundError as missing:
    raise ConfigError(
        f"{missing.name} is not installed; pip install 'continuum-lmcache[report]', or take --json"
    ) from missing

# the page may run its own scripts and nothing else: no network, whatever plotly.js requests
PAGE = """<!doctype html>
<html lang='en'>
<head>
<meta charset='utf-8'>
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1240px; padding: 0 1em }}
td, th {{ padding: .15em 1em; border-bottom: 1px solid #ddd; text-align: right }}
td:first-child {{ text-align: left }}
</style>
<script>{plotly}</script>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""
HOW = (
    "<p>Drag to zoom, scroll over an axis, double click to see all. A pin is the thin bar over the tool's "
    "time. A load is a mark.</p>"
)
CONFIG = {"displayModeBar": False, "scrollZoom": True, "responsive": True, "doubleClick": "reset"}


def page(runs: Sequence[Recording]) -> str:
    """The page. It has ids, tool names, counts and times: a recording has no prompt."""
    until_s = max(run.end_s - run.start_s for run in runs)
    lettered = list(zip(charts.LETTERS, runs, strict=False))
    drawn = [charts.timeline(run, letter, until_s) for letter, run in lettered]
    pictures = [
        figure.to_html(full_html=False, include_plotlyjs=False, config=CONFIG)
        for figure in (*drawn, charts.first_tokens(runs))
    ]
    said = [
        f"<p><b>{letter}</b> {html.escape(f'{run.name}: {summary(run)}')}</p>" for letter, run in lettered
    ]
    body = "\n".join([*said, *pictures, HOW, table([dict(rows(figures(run))) for run in runs])])
    title = html.escape(" against ".join(run.name for run in runs))
    return PAGE.format(title=title, plotly=get_plotlyjs(), body=body)


def rows(found: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """The figures with their whole names: "job_time_s, mean". Unknown ones are a dash."""
    for name, value in found.items():
        if isinstance(value, Mapping):
            yield from rows(value, f"{above}{name}, ")
        else:
            shown = f"{value:,.4g}" if isinstance(value, float) else "-" if value is None else str(value)
            yield f"{above}{name}", shown


def table(runs: Sequence[Mapping[str, str]]) -> str:
    """Every figure, one column per run. Text is escaped."""
    lines = ["<th></th>" + "".join(f"<th>{letter}</th>" for letter in charts.LETTERS[: len(runs)])]
    for name in dict.fromkeys(name for run in runs for name in run):
        cells = (name, *(run.get(name, "-") for run in runs))
        lines.append("".join(f"<td>{html.escape(cell)}</td>" for cell in cells))
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"
