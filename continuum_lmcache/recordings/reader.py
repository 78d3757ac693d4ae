"""Reads a recording: programs with their turns and pins, as values.

Reads the files of continuum_lmcache and of the public prototype. docs/recording.md has the schema.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from continuum_lmcache.errors import TraceError
from continuum_lmcache.recordings.program_history import KINDS, RecordedProgram, RecordedTurn
from continuum_lmcache.telemetry.recorder import FORMAT, META, Event

FILE_NAME = re.compile(r"scheduler_timestamps(_dp\d+)?")
TOKENS = ("prompt_length", "hit_length", "gpu_tokens", "dram_tokens", "ssd_tokens", "output_tokens")
NO_PROGRAM = "null"  # where the prototype puts requests without a job_id
MISSING = {  # a field that no turn of a recording has -> what cannot be computed then
    "prompt_tokens": "prompt_length: no cache hit ratio, no trace",
    "gpu_tokens": "gpu_tokens, dram_tokens, ssd_tokens: hits are not split by tier",
    "queue_delay_s": "queue_delay_s: queue wait is taken as start minus arrival",
    "output_tokens": "output_tokens: no trace",
    "tool": "tool: no gaps by tool",
    "retention": "retention: no TTLs, no calibration",
}


def number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def decision(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and all(number(value.get(k)) for k in PREDICTION))


PREDICTION = ("ttl_s", "probability")
ANYTHING = ("anything", lambda _: True)
FIELD_TYPES = {  # of the fields that this package reads; others may have any value
    **dict.fromkeys((*KINDS, *TOKENS, "blocks", "events_dropped"), ("a number", number)),
    **dict.fromkeys(("at_token", "left_tokens", "lost_tokens", "prefill_s"), ("a number", number)),
    "cause": ("text", lambda value: isinstance(value, str)),
    "queue_delay_s": ("a number of seconds or null", lambda value: value is None or number(value)),
    "turn": ("text", lambda value: isinstance(value, str)),
    "outcome": ("text", lambda value: isinstance(value, str)),
    **dict.fromkeys(("dropped", "lost"), ("an object of counts", lambda value: isinstance(value, dict))),
    "tool": ("a list of names, most specific first", texts),
    "retention": (f"null or an object with {' and '.join(PREDICTION)}", decision),
}


@dataclass(frozen=True, slots=True)
class Recording:
    """One run: its programs by arrival, the time of its last event, and what it lacks."""

    name: str
    programs: tuple[RecordedProgram, ...]
    end_s: float
    notes: tuple[str, ...]

    @property
    def turns(self) -> list[RecordedTurn]:
        return [turn for program in self.programs for turn in program.turns]


def load(path: Path) -> Recording:
    """A recording from its file or its directory (every rank's). Raises TraceError."""
    histories: dict[str, list[Event]] = defaultdict(list)
    for file in files(path):
        for name, event in events_in(file, file.read_text(encoding="utf-8", errors="replace")):
            histories[name].append(event)
    headers = histories.pop(META, [])
    notes = [note for header in headers for note in header_notes(path, header)]
    if not headers and (loose := histories.pop(NO_PROGRAM, None)):
        notes.append(f"left out: {len(loose)} events of requests without a job_id")
    merged = [program_from(name, events) for name, events in histories.items()]
    programs = tuple(sorted((p for p in merged if p.turns), key=lambda p: p.turns[0].arrival_s))
    if not programs:
        raise TraceError(f"{path}: no program arrived in this recording; nothing to analyse")
    unmatched = sum((p.unmatched for p in merged), Counter[str]())
    notes += [f"without a match: {n} {kind}" for kind, n in unmatched.items()]
    end_s = max(time_s for events in histories.values() for e in events for _, time_s in times(e))
    return Recording(str(path), programs, end_s, (*notes, *missing(programs)))


def files(path: Path) -> list[Path]:
    """The files to read: the file itself, or one per rank from a directory."""
    if path.is_file():
        return [path]
    found = sorted(file for file in path.glob("scheduler_timestamps*") if FILE_NAME.fullmatch(file.name))
    if not found:
        raise TraceError(f"{path}: no recording here; expected a file or directory of scheduler_timestamps")
    return found


def events_in(file: Path, text: str) -> Iterator[tuple[str, Event]]:
    """Events of a snapshot: {program: [event, ...]}."""
    try:
        jobs = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{file}: not JSON: {error}; was it cut while being written?") from error
    if not isinstance(jobs, dict):
        raise TraceError(f"{file}: expected an object of event lists by program, not {jobs!r:.80}")
    for name, events in jobs.items():
        if not isinstance(events, list):
            raise TraceError(f"{file}: program {name!r} is not a list of events")
        for number, event in enumerate(events, 1):
            yield name, checked(event, f"{file}: program {name!r}, event {number}")


def checked(event: Any, where: str) -> Event:
    """The event, if its fields have the format's types. Raises TraceError."""
    if not isinstance(event, dict):
        raise TraceError(f"{where}: {event!r:.80} is not an event; expected an object")
    for key, value in event.items():
        expected, holds = FIELD_TYPES.get(key, ANYTHING)
        if not holds(value):
            raise TraceError(f"{where}: {key} is {value!r:.80}; it must be {expected}")
    return event


def times(event: Event) -> list[tuple[str, float]]:
    """The event's name and time: one pair, or none for an event that this reader does not know."""
    return [(key, event[key]) for key in KINDS if key in event][:1]


def header_notes(path: Path, header: Event) -> list[str]:
    """What a recording lacks by its header. Raises TraceError for an unknown format."""
    if header.get("format") != FORMAT:
        raise TraceError(f"{path}: recording format {header.get('format')!r}; this reads format {FORMAT}")
    return [
        f"{verb}: {number} ({what})"
        for verb in ("dropped", "lost")
        for what, number in header.get(verb, {}).items()
    ]


def program_from(name: str, events: list[Event]) -> RecordedProgram:
    """One program with its events in order; those of several ranks are merged."""
    program = RecordedProgram(name, events_dropped=sum(e.get("events_dropped", 0) for e in events))
    known = [(time_s, kind, e) for e in events for kind, time_s in times(e)]
    for time_s, kind, event in sorted(known, key=lambda item: item[0]):
        KINDS[kind](program, event, time_s)
    return program


def missing(programs: Sequence[RecordedProgram]) -> list[str]:
    """What the recording lacks, so that it is not read as zero."""
    turns = [turn for program in programs for turn in program.turns]
    absent = [what for key, what in MISSING.items() if all(getattr(t, key) is None for t in turns)]
    notes = [f"missing {what}" for what in absent]
    ended = [pin for program in programs for pin in program.pins if pin.ended_s is not None]
    if ended and all(pin.outcome is None for pin in ended):
        notes.append("missing outcome: why pins ended is unknown")
    return notes
