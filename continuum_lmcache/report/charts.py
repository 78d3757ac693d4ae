"""The report's figures. Readable without colour: by shade, dash, symbol and pattern."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from continuum_lmcache.recordings.figures import first_tokens_s, sources
from continuum_lmcache.recordings.reader import Recording
from continuum_lmcache.report.timeline import STATES, Span, spans

LETTERS = ("A", "B")
LINES = ("solid", "dash")
OURS, OTHER = "#1b3a5b", "#8c8c8c"  # lines of continuum and of other policies
LAYOUT = {
    "template": "plotly_white",
    "font": {"size": 12},
    "margin": {"l": 60, "r": 40, "t": 70, "b": 50},
    "showlegend": True,
    "legend": {"orientation": "h", "y": 1, "yanchor": "bottom", "x": 1, "xanchor": "right"},
}
STATE_STYLES = {  # state -> colour, width of the bar
    "queued": ("#f0c27b", 0.8),
    "loading": ("#c0392b", 0.8),
    "running": ("#1b3a5b", 0.8),
    "tool": ("#dfe4ea", 0.8),
    "pinned": ("#3c9d6d", 0.3),
}
FILLS = ("#1b3a5b", "#6f93b7", "#c9d6e3", "#8c8c8c")  # as many as there are sources
PATTERNS = ("", "/", "x", ".")
PROGRAMS_SHOWN = 300
ROW_PX = 16
NAME_CHARS = 40


def plain(text: str) -> str:
    """A client's text for plotly, which reads markup: escaped, printable, and of limited length."""
    clean = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return html.escape(clean if len(clean) <= NAME_CHARS else clean[: NAME_CHARS - 1] + "…")


def timeline(run: Recording, letter: str, until_s: float) -> go.Figure:
    """One row per program, by arrival; drag to zoom, double click to see all again."""
    shown = {p.id: number for number, p in enumerate(run.programs[:PROGRAMS_SHOWN])}
    drawn = [span for span in spans(run) if span.program in shown]
    figure = go.Figure([bars(state, drawn, shown) for state in STATES])
    rest = len(run.programs) - len(shown)
    more = f" (the first {len(shown)}, {rest} more)" if rest else ""
    title = f"{letter}: what each program was doing{more}"
    names = [plain(name) for name in shown]
    figure.update_layout(
        LAYOUT, title=title, barmode="overlay", height=160 + ROW_PX * len(shown), dragmode="zoom"
    )
    figure.update_xaxes(title="seconds since the first arrival", range=[0, until_s])
    figure.update_yaxes(tickvals=list(range(len(names))), ticktext=names, range=[len(names) - 0.5, -0.5])
    return figure


def bars(state: str, drawn: Iterable[Span], shown: Mapping[str, int]) -> go.Bar:
    """All spans of one state. Loads get an outline, so that one of unknown duration is visible."""
    mine = [span for span in drawn if span.state == state]
    colour, width = STATE_STYLES[state]
    return go.Bar(
        name=state,
        orientation="h",
        y=[shown[s.program] for s in mine],
        x=[s.end_s - s.start_s for s in mine],
        base=[s.start_s for s in mine],
        width=width,
        marker={"color": colour, "line": {"color": colour, "width": 2 if state == "loading" else 0}},
        hovertext=[
            f"{plain(s.program)}<br>{html.escape(s.about)}<br>{s.start_s:.2f} to {s.end_s:.2f} s"
            for s in mine
        ],
        hoverinfo="text",
    )


def first_tokens(runs: Sequence[Recording]) -> go.Figure:
    """The share of turns whose first token came within a time, for programs' first and later turns."""
    waits = [first_tokens_s(run) for run in runs]
    figure = make_subplots(rows=1, cols=len(waits[0]), subplot_titles=list(waits[0]))
    for column, name in enumerate(waits[0], 1):
        for letter, line, run, found in zip(LETTERS, LINES, runs, waits, strict=False):
            colour = OURS if run.about["policy"] == "continuum" else OTHER
            if found[name]:
                figure.add_trace(shares(letter, line, colour, found[name], column == 1), row=1, col=column)
    figure.update_xaxes(title="seconds from arrival to first token", rangemode="tozero")
    figure.update_yaxes(range=[0, 1.02])
    figure.update_layout(LAYOUT, title="First tokens: share of turns within a time", height=360)
    return figure.update_layout(legend_y=1.12, margin_t=90)


def shares(letter: str, line: str, colour: str, values_s: Sequence[float], legend: bool) -> go.Scatter:
    """An empirical distribution as a staircase."""
    ordered = sorted(values_s)
    return go.Scatter(
        x=[ordered[0], *ordered],
        y=[i / len(ordered) for i in range(len(ordered) + 1)],
        name=letter,
        legendgroup=letter,
        showlegend=legend,
        mode="lines",
        line={"shape": "hv", "dash": line, "color": colour},
    )


def prompt_sources(runs: Sequence[Recording]) -> go.Figure:
    """Where prompts' KV came from: one bar a run."""
    found = [sources(run.turns) for run in runs]
    figure = go.Figure()
    for place, colour, pattern in zip(found[0], FILLS, PATTERNS, strict=True):
        figure.add_bar(
            name=place,
            x=[tokens[place] for tokens in found],
            y=list(LETTERS[: len(runs)]),
            orientation="h",
            marker_color=colour,
            marker_pattern_shape=pattern,
        )
    figure.update_xaxes(title="tokens")
    figure.update_yaxes(autorange="reversed")
    height = 160 + 60 * len(runs)
    return figure.update_layout(
        LAYOUT, title="Prompt tokens by the source of their KV", barmode="stack", height=height
    )
