"""The state of every program over time, as spans for a picture.

    arrival      start          departure        next arrival
       | queued   | loading running | tool            |
                                    | pinned    |

A pin overlaps the tool's time. A recording has no duration of a load: it is a mark at the start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from continuum_lmcache.recordings.program_history import RecordedPin, RecordedProgram, RecordedTurn
from continuum_lmcache.recordings.reader import Recording

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
    zero_s = run.programs[0].turns[0].arrival_s
    for program in run.programs:
        for state, start_s, end_s, about in states_of(program, run.end_s):
            if end_s >= start_s:
                yield Span(program.id, state, start_s - zero_s, end_s - zero_s, about)


def states_of(program: RecordedProgram, end_s: float) -> Iterator[tuple[str, float, float, str]]:
    """One program's states with their times on the wall clock."""
    for number, turn in enumerate(program.turns, 1):
        started_s = end_s if turn.started_s is None else turn.started_s
        gone_s = end_s if turn.departure_s is None else turn.departure_s
        yield "queued", turn.arrival_s, min(started_s, gone_s), f"turn {number} waits"
        if turn.started_s is not None:
            if loaded(turn):
                yield "loading", started_s, started_s, load_text(number, turn)
            yield "running", started_s, gone_s, run_text(number, turn)
        if turn.gap_s is not None and turn.departure_s is not None:
            yield "tool", gone_s, gone_s + turn.gap_s, tool_text(turn)
    for pin in program.pins:
        yield "pinned", pin.taken_s, end_s if pin.ended_s is None else pin.ended_s, pin_text(pin)


def loaded(turn: RecordedTurn) -> int:
    """Tokens that a start loaded from below the GPU."""
    return (turn.dram_tokens or 0) + (turn.ssd_tokens or 0)


def load_text(number: int, turn: RecordedTurn) -> str:
    in_dram, on_disk = turn.dram_tokens or 0, turn.ssd_tokens or 0
    return f"turn {number} loads {in_dram:,} tokens from DRAM, {on_disk:,} from disk"


def run_text(number: int, turn: RecordedTurn) -> str:
    parts = [f"turn {number} runs"]
    if turn.prompt_tokens is not None and turn.hit_tokens is not None:
        parts.append(f"{turn.prompt_tokens:,} prompt tokens, {turn.hit_tokens:,} of them hits")
    if turn.output_tokens is not None:
        parts.append(f"{turn.output_tokens:,} generated")
    if turn.preemptions:
        parts.append(f"preempted {turn.preemptions} times")
    return ", ".join(parts)


def tool_text(turn: RecordedTurn) -> str:
    name = turn.tool[0] if turn.tool else "no tool recognised"
    ttl = f", TTL {turn.retention['ttl_s']:.3g} s" if turn.retention else ""
    return f"{name}: {turn.gap_s:.3g} s{ttl}"


def pin_text(pin: RecordedPin) -> str:
    size = f"{pin.blocks:,} blocks" if pin.blocks is not None else "blocks"
    return f"{size} pinned, {pin.outcome or 'until the end, or not recorded'}"
