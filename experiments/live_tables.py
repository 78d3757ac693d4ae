"""What a recording of known tool calls says of the server: were they recognised, learned, kept?"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib import pyplot as plt
from rich.table import Table

from continuum_lmcache.records.measures import calibration, percentile
from continuum_lmcache.records.recordings import Recording
from continuum_lmcache.records.stories import Turn
from experiments.analyze import draw_calibration, printable, shown, titled
from experiments.forced_calls import FORMS, Call, Script, known, recognised

STRETCH = 100  # turns of a row in the table over time


def said_and_read(run: Recording, scripts: Sequence[Script]) -> Iterator[tuple[str, Call, Turn]]:
    """Every call that was made, its format, and the turn that the server recorded of it."""
    programs = {program.id: program for program in run.programs}
    for script in scripts:
        if program := programs.get(script.program):
            for call, turn in zip(script.calls, program.turns, strict=False):
                yield script.form, call, turn


def recognition_table(run: Recording, scripts: Sequence[Script]) -> Table:
    """By format and in all: calls made, calls whose key the server recorded as it should."""
    table = titled(
        "Tool calls recognised", "format", "calls", "recognised", "of known commands", "recognised"
    )
    told = list(said_and_read(run, scripts))
    for form in (*FORMS, "all"):
        right = [(known(c), recognised(c, t.tool or ())) for f, c, t in told if form in (f, "all")]
        commands = [found for is_known, found in right if is_known]
        counts = (len(right), share(found for _, found in right), len(commands), share(commands))
        table.add_row(form, *map(shown, counts))
    return table


def share(found: Sequence[bool] | Iterator[bool]) -> float | None:
    """How many of them are true, 0 to 1."""
    values = list(found)
    return sum(values) / len(values) if values else None


def decided(run: Recording) -> list[Turn]:
    """Turns with a decision, in the order in which these were made."""
    turns = [t for t in run.turns if t.retention is not None and t.departure_s is not None]
    return sorted(turns, key=lambda t: t.departure_s or 0.0)


def is_cold(turn: Turn) -> bool:
    return turn.retention is not None and turn.retention["level"] == "cold"


def without(run: Recording, left_out: Callable[[Turn], object], name: str) -> Recording:
    """The run without some of its decisions; its turns and gaps stay."""
    programs = tuple(
        replace(p, turns=[replace(t, retention=None) if left_out(t) else t for t in p.turns])
        for p in run.programs
    )
    return replace(run, name=name, programs=programs)


def after(run: Recording, turns: int) -> Recording:
    """The run without its first decisions."""
    early = {id(turn) for turn in decided(run)[:turns]}
    return without(run, lambda turn: id(turn) in early, f"after {turns} turns")


def views(run: Recording, early_turns: int) -> list[Recording]:
    """All decisions, those after the cold start, and those after so many turns."""
    learned = without(run, is_cold, "after the cold start")
    return [replace(run, name="all decisions"), learned, after(run, early_turns)]


def ttl_table(run: Recording, by: Callable[[Turn], str], title: str) -> Table:
    """What the tools' gaps were and what TTLs they got after the cold start."""
    heads = ("turns", "gap, median [s]", "P90 [s]", "benefit, median [s]", "TTL, median [s]", "P(tau)")
    table = titled(title, "", *heads, "back in time", "TTL = 0")
    groups: dict[str, list[Turn]] = defaultdict(list)
    for turn in decided(run):
        if not is_cold(turn):
            groups[by(turn)].append(turn)
    for name, turns in sorted(groups.items(), key=lambda item: -len(item[1])):
        kept = [t.retention for t in turns if t.retention is not None]
        gaps_s = [t.gap_s for t in turns if t.gap_s is not None]
        figures = (
            len(turns),
            percentile(gaps_s, 50),
            percentile(gaps_s, 90),
            *(percentile([k[fact] for k in kept], 50) for fact in ("benefit_s", "ttl_s", "probability")),
            share(t.gap_s <= t.retention["ttl_s"] for t in turns if t.gap_s is not None and t.retention),
            share(k["ttl_s"] == 0 for k in kept),
        )
        table.add_row(printable(name), *map(shown, figures))
    return table


def tool_and_level(turn: Turn) -> str:
    """The tool, and whose gaps answered for it."""
    own = turn.retention is not None and turn.retention["level"].startswith("tool:")
    return f"{tool_of(turn)}, {'its own' if own else 'of all'}"


def tool_of(turn: Turn) -> str:
    return turn.tool[-1] if turn.tool else "(none)"


def command_of(turn: Turn) -> str:
    return turn.tool[-2] if turn.tool and len(turn.tool) > 1 else tool_of(turn)


def levels_table(run: Recording) -> Table:
    """Which distribution answered, as the run went on, and with what result."""
    turns = decided(run)
    levels = sorted({t.retention["level"] for t in turns if t.retention})
    heads = (*levels, "benefit, median [s]", "TTL, median [s]", "TTL = 0")
    table = titled("Over time", "turns", *heads)
    for at in range(0, len(turns), STRETCH):
        kept: list[Mapping[str, object]] = [t.retention for t in turns[at : at + STRETCH] if t.retention]
        counts = Counter(k["level"] for k in kept)
        spreads = [percentile([k[name] for k in kept], 50) for name in ("benefit_s", "ttl_s")]  # type: ignore[misc]
        figures = (*(counts[level] for level in levels), *spreads, share(k["ttl_s"] == 0 for k in kept))
        table.add_row(f"{at + 1}-{at + len(kept)}", *map(shown, figures))
    return table


def draw_views(runs: Sequence[Recording], path: Path) -> None:
    """One calibration plot a view, beside each other."""
    canvas, panels = plt.subplots(1, len(runs), figsize=(4.2 * len(runs), 4.2), layout="constrained")
    for axes, run in zip(panels, runs, strict=True):
        draw_calibration(axes, [calibration(run)])
        axes.set_title(run.name)
        axes.legend().remove()
    canvas.savefig(path, dpi=150)
    plt.close(canvas)
