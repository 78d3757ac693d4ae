"""The report's figures. Readable without colour: by shade, dash, symbol and pattern."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from continuum_lmcache.recordings.metrics import calibration, jct_s, outcomes, sources, tools, waits_s
from continuum_lmcache.recordings.reader import Recording
from continuum_lmcache.report.timeline import STATES, Span, spans

LETTERS = ("A", "B")
LINES = ("solid", "dash")
COLOURS = ("#1b3a5b", "#d9822b")
SYMBOLS = ("circle", "diamond-open")
LAYOUT = {
    "template": "plotly_white",
    "font": {"size": 12},
    "margin": {"l": 60, "r": 40, "t": 70, "b": 50},
    "modebar": {"orientation": "v"},
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
FILLS = ("#1b3a5b", "#6f93b7", "#c9d6e3", "#d9822b", "#f0c27b", "#3c9d6d", "#999999")
PATTERNS = ("", "/", "x", "", ".", "\\", "-")
PROGRAMS_SHOWN = 300
ROW_PX = 16
NAME_CHARS = 40
TOOLS_SHOWN = 12
FLOOR_S = 1e-3  # shorter times are drawn here: the axis is logarithmic, and a TTL may be 0


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


def distributions(runs: Sequence[Recording]) -> go.Figure:
    """The share of cases within a time: job times, waits, gaps, pins."""
    cases = {
        "job time": [[jct_s(p) for p in run.programs if p.complete] for run in runs],
        "wait in the queue": [list(waits_s(run.turns)) for run in runs],
        "tool gap": [[t.gap_s for t in run.turns if t.gap_s is not None] for run in runs],
        "pin held": [[s for held in outcomes(run).values() for s in held] for run in runs],
    }
    figure = make_subplots(rows=1, cols=len(cases), subplot_titles=list(cases))
    for column, found in enumerate(cases.values(), 1):
        for letter, line, colour, values_s in zip(LETTERS, LINES, COLOURS, found, strict=False):
            if values_s:
                figure.add_trace(shares(letter, line, colour, values_s, column == 1), row=1, col=column)
    figure.update_xaxes(title="seconds", rangemode="tozero")
    figure.update_yaxes(range=[0, 1.02])
    figure.update_layout(LAYOUT, title="Share of cases within a time", height=360)
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


def gaps_by_tool(runs: Sequence[Recording]) -> go.Figure:
    """How long each of the most frequent commands took."""
    figure = go.Figure()
    for letter, colour, run in zip(LETTERS, COLOURS, runs, strict=False):
        named = [
            (plain(name), max(t.gap_s, FLOOR_S))
            for name, turns in list(tools(run).items())[:TOOLS_SHOWN]
            for t in turns
            if t.gap_s is not None
        ]
        figure.add_trace(
            go.Box(
                x=[gap_s for _, gap_s in named],
                y=[name for name, _ in named],
                name=letter,
                orientation="h",
                marker_color=colour,
            )
        )
    figure.update_xaxes(title="seconds", type="log")
    figure.update_yaxes(autorange="reversed")
    return figure.update_layout(LAYOUT, title="Tool gaps by command", boxmode="group", height=420)


def ttl_against_gap(runs: Sequence[Recording]) -> go.Figure:
    """For each decision its TTL, and how long the program was away afterwards."""
    figure = go.Figure()
    largest_s = 1.0
    for letter, colour, symbol, run in zip(LETTERS, COLOURS, SYMBOLS, runs, strict=False):
        seen = [(t.gap_s, t.retention["ttl_s"], t) for t in run.turns if t.gap_s is not None and t.retention]
        largest_s = max([largest_s, *(x for gap_s, ttl_s, _ in seen for x in (gap_s, ttl_s))])
        about = [
            f"{plain(t.tool[0] if t.tool else 'no tool')}<br>gap {gap_s:.3g} s, TTL {ttl_s:.3g} s"
            for gap_s, ttl_s, t in seen
        ]
        points = [(max(gap_s, FLOOR_S), max(ttl_s, FLOOR_S)) for gap_s, ttl_s, _ in seen]
        figure.add_trace(dots(letter, colour, symbol, points, about))
    figure.add_trace(diagonal("TTL = gap", FLOOR_S, largest_s))
    figure.update_xaxes(title="realised gap, s", type="log")
    figure.update_yaxes(title=f"TTL, s; 0 is drawn at {FLOOR_S:g}", type="log")
    return figure.update_layout(
        LAYOUT, title="TTL against the gap that followed (above the line: long enough)", height=420
    )


def dots(
    letter: str, colour: str, symbol: str, points: Sequence[tuple[float, float | None]], about: Sequence[str]
) -> go.Scatter:
    """One point per case, with a line of text for each."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    marker = {"color": colour, "symbol": symbol, "size": 8, "opacity": 0.7}
    return go.Scatter(
        x=xs, y=ys, hovertext=about, hoverinfo="text", name=letter, mode="markers", marker=marker
    )


def diagonal(name: str, first: float, last: float) -> go.Scatter:
    """The line where both axes are equal."""
    ends, line = [first, last], {"color": "#999999"}
    return go.Scatter(x=ends, y=ends, mode="lines", line=line, name=name, hoverinfo="skip")


def stacks(title: str, runs: Sequence[Mapping[str, float]], unit: str) -> go.Figure:
    """The parts of a total, one bar per run."""
    parts = dict.fromkeys(part for run in runs for part in run)
    figure = go.Figure()
    for i, part in enumerate(parts):
        figure.add_bar(
            name=plain(part),
            x=[run.get(part, 0) for run in runs],
            y=list(LETTERS[: len(runs)]),
            orientation="h",
            marker_color=FILLS[i % len(FILLS)],
            marker_pattern_shape=PATTERNS[i % len(PATTERNS)],
        )
    figure.update_xaxes(title=unit)
    figure.update_yaxes(autorange="reversed")
    return figure.update_layout(LAYOUT, title=title, barmode="stack", height=160 + 60 * len(runs))


def tier_split(runs: Sequence[Recording]) -> go.Figure:
    return stacks("Prompt tokens by the source of their KV", [sources(run.turns) for run in runs], "tokens")


def pin_outcomes(runs: Sequence[Recording]) -> go.Figure:
    return stacks("Pins by outcome", [{k: len(v) for k, v in outcomes(run).items()} for run in runs], "pins")


def predictions(runs: Sequence[Recording]) -> go.Figure:
    """Realised against predicted P(tau); on the diagonal they are equal."""
    figure = go.Figure(diagonal("predicted = realised", 0, 1))
    for letter, colour, symbol, run in zip(LETTERS, COLOURS, SYMBOLS, runs, strict=False):
        known = [b for b in calibration(run) if b.realised is not None]
        about = [f"{b.predictions} predictions, {b.censored} censored" for b in known]
        figure.add_trace(dots(letter, colour, symbol, [(b.predicted, b.realised) for b in known], about))
    figure.update_xaxes(title="predicted P(tau)", range=[0, 1.02])
    figure.update_yaxes(title="realised", range=[0, 1.02])
    return figure.update_layout(LAYOUT, title="P(tau): predicted and realised", height=420)
