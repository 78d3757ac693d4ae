"""The state of every program over time, as spans for a picture.

    arrival      start          departure        next arrival
       | queued   | running        | tool            |
                                   | pinned    |

A pin overlaps the tool's time. A start that loads KV from DRAM or disk has a mark: how long a load took is
not recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from continuum_lmcache.recordings.reader import RecordedProgram, RecordedTurn, Recording

STATES = ("queued", "loading", "running", "tool", "pinned")


@dataclass(frozen=True, slots=True)
class Span:
    """One program in one state. Seconds since the run's first arrival."""

    program: str
    state: str  # one of STATES
    start_s: float
    end_s: float
    about: str  # one line of text for the reader


def spans(run: Recording) -> Iterator[Span]:
    """All spans of a run, program by program; states that were open at its end last until then."""
    for program in run.programs:
        for state, start_s, end_s, about in states_of(program, run.end_s):
            if end_s >= start_s:
                yield Span(program.id, state, start_s - run.start_s, end_s - run.start_s, about)


def states_of(program: RecordedProgram, end_s: float) -> Iterator[tuple[str, float, float, str]]:
    """One program's states with their times on the wall clock."""
    for number, turn in enumerate(program.turns, 1):
        started_s = end_s if turn.started_s is None else turn.started_s
        gone_s = end_s if turn.departure_s is None else turn.departure_s
        yield "queued", turn.arrival_s, min(started_s, gone_s), f"turn {number} waits"
        if turn.started_s is not None:
            in_dram, on_disk = turn.sources["DRAM"], turn.sources["disk"]
            if in_dram or on_disk:
                loaded = f"turn {number} loads {in_dram:,} tokens from DRAM, {on_disk:,} from disk"
                yield "loading", started_s, started_s, loaded
            yield "running", started_s, gone_s, run_text(number, turn)
        if turn.gap_s is not None:
            ttl = f", TTL {turn.ttl_s:.3g} s" if turn.ttl_s is not None else ""
            about = f"{turn.tool or 'no tool recognised'}: {turn.gap_s:.3g} s{ttl}"
            yield "tool", gone_s, gone_s + turn.gap_s, about
    for pin in program.pins:
        until_s = end_s if pin.ended_s is None else pin.ended_s
        yield "pinned", pin.taken_s, until_s, f"{pin.blocks:,} blocks pinned, {pin.outcome}"


def run_text(number: int, turn: RecordedTurn) -> str:
    computed = turn.sources["computed"]
    parts = [f"turn {number} runs: {turn.prompt_tokens:,} prompt tokens, {computed:,} of them computed"]
    if turn.departure_s is not None:
        parts.append(f"{turn.output_tokens:,} generated")
    if turn.preemptions:
        parts.append(f"preempted {turn.preemptions} times")
    return ", ".join(parts)
