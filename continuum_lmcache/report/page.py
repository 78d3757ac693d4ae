"""`continuum-lmcache report`: one self-contained HTML page on one recorded run, or on two."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
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
WORDS = {  # of the figures' names
    "seconds": "length, s",
    "programs_complete": "programs that ended in it",
    "job_time_s": "time of a program, s",
    "first_token_s": "first token after, s",
    "queue_wait_s": "wait in the queue, s",
    "prompt_tokens": "prompt tokens by source",
    "lost_tokens": "tokens computed again, by cause",
    "pins_by_outcome": "pins by how they ended",
    "p95": "95th percentile",
    "p99": "99th percentile",
    "max": "longest",
}
CONFIG = {"displayModeBar": False, "scrollZoom": True, "responsive": True, "doubleClick": "reset"}


def page(runs: Sequence[Recording]) -> str:
    """The page. It has ids, tool names, counts and times: a recording has no prompt."""
    until_s = max(run.end_s - run.start_s for run in runs)
    labels = labels_of(runs)
    labelled = list(zip(labels, runs, strict=True))
    drawn = [charts.timeline(run, label, until_s) for label, run in labelled]
    pictures = [
        figure.to_html(full_html=False, include_plotlyjs=False, config=CONFIG)
        for figure in (*drawn, charts.over_time(runs, labels, until_s), charts.first_tokens(runs, labels))
    ]
    said = [f"<p><b>{html.escape(label)}</b> {html.escape(summary(run))}</p>" for label, run in labelled]
    found = {label: dict(rows(figures(run))) for label, run in labelled}
    body = "\n".join([*said, *pictures, HOW, table(found)])
    title = html.escape(" against ".join(labels))
    return PAGE.format(title=title, plotly=get_plotlyjs(), body=body)


def labels_of(runs: Sequence[Recording]) -> list[str]:
    """What each run is called: its folder, with a number where two are equal."""
    paths = [Path(run.name).resolve() for run in runs]
    names = [path.parent.name if path.is_file() else path.name for path in paths]
    return names if len({*names}) == len(names) else [f"{name} ({n})" for n, name in enumerate(names, 1)]


def rows(found: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """The figures with their whole names in words: "time of a program, s: mean". Unknown ones are a dash."""
    for name, value in found.items():
        if isinstance(value, Mapping):
            yield from rows(value, f"{above}{WORDS.get(name, name)}: ")
        else:
            text = "-" if value is None else str(value)
            if isinstance(value, int | float):
                text = f"{value:,.3f}" if isinstance(value, float) and value < 100 else f"{value:,.0f}"
            yield above + WORDS.get(name, name), text


def table(runs: Mapping[str, Mapping[str, str]]) -> str:
    """Every figure, one column per run. Text is escaped."""
    lines = ["<th></th>" + "".join(f"<th>{html.escape(label)}</th>" for label in runs)]
    for name in dict.fromkeys(name for run in runs.values() for name in run):
        cells = (name, *(run.get(name, "-") for run in runs.values()))
        lines.append("".join(f"<td>{html.escape(cell)}</td>" for cell in cells))
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"
