"""The report's figures. Readable without colour: by shade, dash and width."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import plotly.graph_objects as go

from continuum_lmcache.recordings.figures import first_tokens_s
from continuum_lmcache.recordings.reader import RecordedProgram, Recording

LINES = ("solid", "dash")
OURS, OTHER = "#1b3a5b", "#8c8c8c"  # lines of continuum and of other policies
CLEAR = "rgba(0,0,0,0)"
LAYOUT = {
    "template": "plotly_white",
    "font": {"size": 12, "family": "system-ui, sans-serif", "color": "#222"},
    "margin": {"l": 40, "r": 20, "t": 30, "b": 50},
    "legend": {"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0},
    "paper_bgcolor": CLEAR,  # the page's own, light or dark
    "plot_bgcolor": CLEAR,
}
STATES = {  # of a program: colour, width of the bar; a later one lies on an earlier one
    "queued": ("#f0c27b", 0.8),
    "running": ("#1b3a5b", 0.8),
    "tool": ("#dfe4ea", 0.8),
    "pinned": ("#3c9d6d", 0.3),
    "loading": ("#c0392b", 0.8),
}
RUNNING_KV = "KV of running prompts, tokens"
PROGRAMS_SHOWN = 300
Points = Mapping[str, Sequence[tuple[float, float]]]  # of a run's line in each picture: x, y
ROW_PX = 16
NAME_CHARS = 40


@dataclass(frozen=True, slots=True)
class Span:
    """One program in one state (STATES), on the wall clock.

    A pin overlaps its tool's time. A load has no length: how long it took is not recorded.
    """

    state: str
    start_s: float
    end_s: float
    about: str  # one line of text for the reader
    adds: Mapping[str, int] = field(default_factory=dict)  # to the curves, for as long as it lasts


def spans(program: RecordedProgram, end_s: float) -> Iterator[Span]:
    """All spans of a program; states that were open at the recording's end last until then."""
    for number, turn in enumerate(program.turns, 1):
        gone_s = end_s if turn.departure_s is None else turn.departure_s
        started_s = gone_s if turn.started_s is None else turn.started_s
        yield Span("queued", turn.arrival_s, started_s, f"turn {number} waits", {"waiting": 1})
        if turn.started_s is not None:
            in_dram, on_disk, computed = (turn.sources[place] for place in ("DRAM", "disk", "computed"))
            if in_dram or on_disk:
                loaded = f"turn {number} loads {in_dram:,} tokens from DRAM, {on_disk:,} from disk"
                yield Span("loading", started_s, started_s, loaded)
            about = f"turn {number}: {turn.prompt_tokens:,} prompt tokens, {computed:,} of them computed; "
            about += f"{turn.output_tokens:,} generated; preempted {turn.preemptions} times"
            adds = {"running": 1, RUNNING_KV: turn.prompt_tokens}
            yield Span("running", started_s, gone_s, about, adds)
        if turn.gap_s is not None:
            ttl = f", TTL {turn.ttl_s:.3g} s" if turn.ttl_s is not None else ""
            about = f"{short(turn.tool) or 'no tool recognised'}: {turn.gap_s:.3g} s{ttl}"
            yield Span("tool", gone_s, gone_s + turn.gap_s, about)
    for pin in program.pins:
        until_s = end_s if pin.ended_s is None else pin.ended_s
        about = f"{pin.blocks:,} blocks pinned, {pin.outcome}"
        yield Span("pinned", pin.taken_s, until_s, about, {"pinned blocks": pin.blocks})


def short(text: str) -> str:
    """A client's text, printable and of limited length."""
    clean = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return clean if len(clean) <= NAME_CHARS else clean[: NAME_CHARS - 1] + "…"


def plain(text: str) -> str:
    """The same for plotly, which reads markup."""
    return html.escape(short(text))


def timeline(run: Recording, until_s: float) -> go.Figure:
    """One row per program, by arrival."""
    shown = run.programs[:PROGRAMS_SHOWN]
    drawn = [(row, span) for row, program in enumerate(shown) for span in spans(program, run.end_s)]
    names, figure = [plain(program.id) for program in shown], go.Figure()
    for state, (colour, width) in STATES.items():
        mine = [(row, span) for row, span in drawn if span.state == state]
        begins_s = [span.start_s - run.start_s for _, span in mine]
        lasts_s = [span.end_s - span.start_s for _, span in mine]
        about = [
            f"{names[row]}<br>{html.escape(span.about)}<br>{at_s:.2f} to {at_s + for_s:.2f} s"
            for (row, span), at_s, for_s in zip(mine, begins_s, lasts_s, strict=True)
        ]
        line = {"color": colour, "width": 3 if state == "loading" else 0}  # it has no length
        figure.add_bar(
            name=state,
            orientation="h",
            y=[row for row, _ in mine],
            x=lasts_s,
            base=begins_s,
            width=width,
            marker={"color": colour, "line": line},
            hovertext=about,
            hoverinfo="text",
        )
    figure.update_layout(LAYOUT, barmode="overlay", height=90 + ROW_PX * len(shown))
    figure.update_xaxes(title="seconds since the first arrival", range=[0, until_s])
    rows = list(range(len(names)))
    return figure.update_yaxes(tickvals=rows, ticktext=names, range=[len(names) - 0.5, -0.5])


def curves(run: Recording) -> dict[str, list[tuple[float, int]]]:
    """Turns that run and wait, the KV of prompts that run, and pinned blocks, by seconds since the first
    arrival. A head that programs share counts once for each."""
    names = ("running", "waiting", RUNNING_KV, "pinned blocks")
    changes: dict[str, list[tuple[float, int]]] = {name: [] for name in names}
    for span in (span for program in run.programs for span in spans(program, run.end_s)):
        for name, amount in span.adds.items():
            changes[name] += [(span.start_s - run.start_s, amount), (span.end_s - run.start_s, -amount)]
    return {name: levels(found) for name, found in changes.items()}


def levels(changes: Iterable[tuple[float, int]]) -> list[tuple[float, int]]:
    """The sum after each time's changes. Within a time it has no order: one may end where one begins."""
    ordered = sorted(changes)
    return [*dict(zip((x for x, _ in ordered), accumulate(n for _, n in ordered), strict=True)).items()]


def over_time(runs: Sequence[Recording], labels: Sequence[str], until_s: float) -> dict[str, go.Figure]:
    """Turns that run, turns that wait, and what KV is for: where memory is short, the second grows."""
    figures = stairs(runs, labels, [curves(run) for run in runs])
    for figure in figures.values():
        figure.update_xaxes(title="seconds since the first arrival", range=[0, until_s])
        figure.update_yaxes(rangemode="tozero")
    return figures


def shares(values_s: Sequence[float]) -> list[tuple[float, float]]:
    """Each value with the share of all that are no larger, from 0."""
    ordered = sorted(values_s)
    return [(at_s, i / len(ordered)) for i, at_s in enumerate([*ordered[:1], *ordered])]


def first_tokens(runs: Sequence[Recording], labels: Sequence[str]) -> dict[str, go.Figure]:
    """The share of turns whose first token came within a time, for programs' first and later turns."""
    waits = [{name: shares(found_s) for name, found_s in first_tokens_s(run).items()} for run in runs]
    figures = stairs(runs, labels, waits)
    for figure in figures.values():
        figure.update_xaxes(title="seconds from arrival to first token", rangemode="tozero")
        figure.update_yaxes(range=[0, 1.02], tickformat=".0%")
    return figures


def stairs(runs: Sequence[Recording], labels: Sequence[str], found: Sequence[Points]) -> dict[str, go.Figure]:
    """A picture for each name in `found`, with a line of steps for every run. The first names the lines."""
    figures = {name: go.Figure(layout={**LAYOUT, "height": 260}) for name in found[0]}
    for label, dash, run, lines in zip(labels, LINES, runs, found, strict=False):
        colour = OURS if run.about["policy"] == "continuum" else OTHER
        for number, (name, points) in enumerate(lines.items()):
            figures[name].add_scatter(
                x=[x for x, _ in points],
                y=[y for _, y in points],
                name=plain(label),
                showlegend=number == 0 and len(runs) > 1,
                mode="lines",
                line={"shape": "hv", "dash": dash, "color": colour},
            )
    return figures
