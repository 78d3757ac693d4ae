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
<meta name='viewport' content='width=device-width'>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1240px; padding: 0 1em }}
body {{ overflow-wrap: anywhere }}
h2 {{ font-size: 1.2em; margin: 2em 0 .5em }}
.figures {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(var(--least), 1fr)) }}
.figures {{ overflow-x: auto }}
figure {{ margin: 0; min-width: 0 }}
table {{ border-collapse: collapse; margin-top: 2em }}
td, th {{ padding: .15em .6em; border-bottom: 1px solid #8886; text-align: right; vertical-align: top }}
td:first-child {{ text-align: left; padding-left: 0; min-width: 10em }}
@media (prefers-color-scheme: dark) {{ .js-plotly-plot {{ filter: invert(.9) hue-rotate(180deg) }} }}
</style>
<script>{plotly}</script>
</head>
<body>
<h1>{title}</h1>
{body}
<script>dispatchEvent(new Event('resize')) // a picture was drawn before those beside it were there</script>
</body>
</html>
"""
HOW = (
    "<p>Drag over a picture to zoom, double click to see all. A pin is the thin bar over the tool's time. "
    "A load is a red mark.</p>"
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
CONFIG = {"displayModeBar": False, "responsive": True, "doubleClick": "reset"}
# a finger scrolls the page: plotly would take its moves over a picture for itself
ON_TOUCH = "if (matchMedia('(pointer: coarse)').matches) Plotly.relayout('{plot_id}', {dragmode: false})"
TIMELINE_PX, CURVES_PX = 640, 260  # narrowest; in a narrower window the first is scrolled to the side


def page(runs: Sequence[Recording]) -> str:
    """The page. It has ids, tool names, counts and times: a recording has no prompt."""
    until_s = max(run.end_s - run.start_s for run in runs)
    labels = labels_of(runs)
    labelled = list(zip(labels, runs, strict=True))
    drawn = [
        section(what_it_shows(label, run), {"": charts.timeline(run, until_s)}, TIMELINE_PX)
        for label, run in labelled
    ]
    drawn += [
        section("Turns and pins over time", charts.over_time(runs, labels, until_s), CURVES_PX),
        section("First tokens: share of turns within a time", charts.first_tokens(runs, labels), CURVES_PX),
    ]
    said = [f"<p><b>{html.escape(label)}</b> {html.escape(summary(run))}</p>" for label, run in labelled]
    found = {label: dict(rows(figures(run))) for label, run in labelled}
    body = "\n".join([*said, HOW, *drawn, table(found)])
    title = html.escape(" against ".join(labels))
    return PAGE.format(title=title, plotly=get_plotlyjs(), body=body)


def what_it_shows(label: str, run: Recording) -> str:
    """A timeline's heading."""
    rest = len(run.programs) - charts.PROGRAMS_SHOWN
    more = f" (the first {charts.PROGRAMS_SHOWN}, {rest:,} more)" if rest > 0 else ""
    return f"{label}: what each program was doing{more}"


def section(heading: str, figures: Mapping[str, Any], least_px: int) -> str:
    """Figures, beside each other where there is room for that."""
    drawn = [
        f"<figure><figcaption>{html.escape(name)}</figcaption>"
        + figure.to_html(full_html=False, include_plotlyjs=False, config=CONFIG, post_script=ON_TOUCH)
        + "</figure>"
        for name, figure in figures.items()
    ]
    inside = "\n".join(drawn)
    return f"<h2>{html.escape(heading)}</h2><div class='figures' style='--least: {least_px}px'>{inside}</div>"


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
