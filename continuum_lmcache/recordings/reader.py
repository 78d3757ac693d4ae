"""Reads a recording: what every program did and when. docs/recording.md has the format."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from continuum_lmcache.errors import TraceError
from continuum_lmcache.telemetry.recorder import FORMAT, META, Event

TIMED = ("_time", "_to_running")  # ends of events' names
FILE_NAME = re.compile(r"scheduler_timestamps(_dp\d+)?")
FACTS = ("model", "policy", "machine", "versions")  # of the header
SOURCES = {"GPU": "gpu_tokens", "DRAM": "dram_tokens", "disk": "ssd_tokens"}


@dataclass(slots=True)
class RecordedPin:
    """One pin. Times on the wall clock; None: it was held when the recording ended."""

    taken_s: float
    blocks: int
    ended_s: float | None = None
    outcome: str = "open"


@dataclass(slots=True)
class RecordedTurn:
    """One turn. Times on the wall clock; None: it did not happen before the recording ended."""

    arrival_s: float
    prompt_tokens: int
    started_s: float | None = None
    sources: dict[str, int] = field(default_factory=dict)  # prompt tokens by where their KV was
    departure_s: float | None = None
    output_tokens: int = 0
    first_token_s: float | None = None  # from its arrival
    tool: str = ""  # most specific name; "": none was recognised
    ttl_s: float | None = None  # None: no decision was made
    preemptions: int = 0
    gap_s: float | None = None  # from its end to the program's next turn, if no other turn was live


@dataclass(slots=True)
class RecordedProgram:
    """One program, built from its events in the order in which they happened."""

    id: str
    turns: list[RecordedTurn] = field(default_factory=list)  # by arrival
    pins: list[RecordedPin] = field(default_factory=list)
    is_cut: bool = False  # events are missing
    _live: dict[str, RecordedTurn] = field(default_factory=dict)
    _last: RecordedTurn | None = None  # the last that departed

    @property
    def complete(self) -> bool:
        """No event is missing, and every turn departed."""
        return bool(self.turns) and not self._live and not self.is_cut

    @property
    def job_time_s(self) -> float:
        """First arrival to last departure, tools included (arXiv 2511.02230 §6)."""
        return max(turn.departure_s or 0.0 for turn in self.turns) - self.turns[0].arrival_s

    def add(self, kind: str, event: Event, time_s: float) -> None:
        """Apply one event. What belongs to a turn or pin whose beginning is missing is left out."""
        if kind == "Request_arrival_time":
            if self._last is not None and self._last.departure_s is not None and not self._live:
                self._last.gap_s = round(time_s - self._last.departure_s, 6)
            turn = self._live[event["turn"]] = RecordedTurn(time_s, event["prompt_length"])
            self.turns.append(turn)
        elif kind == "pinned_time":
            self.pins.append(RecordedPin(time_s, event["blocks"]))
        elif kind == "unpinned_time":
            if self.pins and self.pins[-1].ended_s is None:
                self.pins[-1].ended_s, self.pins[-1].outcome = time_s, event["outcome"]
        elif (found := self._live.get(event["turn"])) is not None:
            self._change(found, kind, event, time_s)

    def _change(self, turn: RecordedTurn, kind: str, event: Event, time_s: float) -> None:
        if kind == "Request_evicted_from_running_queue_time":
            turn.preemptions += 1
        elif kind == "waiting_to_running":
            turn.started_s, turn.prompt_tokens = time_s, event["prompt_length"]
            turn.sources = {place: event[name] for place, name in SOURCES.items()}
            turn.sources["computed"] = max(0, turn.prompt_tokens - sum(turn.sources.values()))
        else:
            del self._live[event["turn"]]
            turn.departure_s, turn.output_tokens = time_s, event["output_tokens"]
            turn.first_token_s, turn.tool = event["first_token_s"], (event["tool"] or [""])[0]
            if event["retention"] is not None:
                turn.ttl_s = event["retention"]["ttl_s"]
            self._last = turn


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_decision(value: Any) -> bool:
    return value is None or (
        isinstance(value, dict) and (value.get("ttl_s") is None or is_number(value["ttl_s"]))
    )


def is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


NUMBER = ("a number", is_number)
TEXT = ("text", lambda value: isinstance(value, str))
STARTED = {"turn": TEXT, "prompt_length": NUMBER, **dict.fromkeys(SOURCES.values(), NUMBER)}
FIELDS: dict[str, dict[str, Any]] = {  # event, by the name of its time -> the fields that are read
    "Request_arrival_time": {"turn": TEXT, "prompt_length": NUMBER},
    "waiting_to_running": STARTED,
    "Request_evicted_from_running_queue_time": {"turn": TEXT},
    "Request_departure_time": {
        "turn": TEXT,
        "output_tokens": NUMBER,
        "first_token_s": ("a number or null", lambda value: value is None or is_number(value)),
        "tool": ("a list of names", is_names),
        "retention": ("null, or an object with ttl_s", is_decision),
    },
    "pinned_time": {"blocks": NUMBER},
    "unpinned_time": {"outcome": TEXT},
}


@dataclass(frozen=True, slots=True)
class Recording:
    """One run: its programs by arrival, the time of its last event, and its header."""

    name: str
    programs: tuple[RecordedProgram, ...]
    end_s: float
    about: dict[str, str]  # FACTS; "" where they are not known
    lost: dict[str, int]  # tokens that returning programs had left and lost, by cause
    dropped: int = 0  # events that the recorder's bound left out

    @property
    def turns(self) -> list[RecordedTurn]:
        return [turn for program in self.programs for turn in program.turns]

    @property
    def start_s(self) -> float:
        return self.programs[0].turns[0].arrival_s


def load(path: Path) -> Recording:
    """A recording from its file, or from its directory with every rank's. Raises TraceError."""
    heads: list[Event] = []
    timed: list[tuple[float, str, str, Event]] = []
    programs: dict[str, RecordedProgram] = {}
    lost: Counter[str] = Counter()
    for file in files(path):
        jobs = contents(file)
        heads.append(header(file, jobs.pop(META, None)))
        for name, event, where in events(file, jobs):
            program = programs.setdefault(name, RecordedProgram(name))
            program.is_cut |= "events_dropped" in event
            if isinstance(event.get("cause"), str) and is_number(event.get("lost_tokens")):
                lost[event["cause"]] += event["lost_tokens"]
            timed += [(time_s, name, kind, event) for kind, time_s in checked(event, where)]
    for time_s, name, kind, event in sorted(timed, key=lambda item: item[0]):
        programs[name].add(kind, event, time_s)
    found = sorted((p for p in programs.values() if p.turns), key=lambda p: p.turns[0].arrival_s)
    if not found:
        raise TraceError(f"{path}: no program arrived in this recording")
    facts = {name: str(heads[0].get(name, "")) for name in FACTS}
    about = {name: "".join(c for c in fact[:200] if c.isprintable()) for name, fact in facts.items()}
    dropped = sum(head["dropped"] for head in heads)
    return Recording(str(path), tuple(found), max(timed, key=lambda t: t[0])[0], about, dict(lost), dropped)


def story(path: Path, program: str) -> Iterator[str]:
    """A line for each event of a program: seconds since its first, and all that was recorded of it.

    Raises TraceError for a program that is not there.
    """
    found = [each for file in files(path) for each in events(file, contents(file)) if each[0] == program]
    timed = [(*next(iter(event.items()), ("", None)), event) for _, event, _ in found]
    ordered = sorted(
        (each for each in timed if each[0].endswith(TIMED) and is_number(each[1])), key=itemgetter(1)
    )
    if not ordered:
        raise TraceError(
            f"{path}: no program {program!r}; names are hashes, unless the server has continuum.record_ids: "
            "the report's timeline lists them"
        )
    for kind, at_s, event in ordered:
        yield f"{at_s - ordered[0][1]:10.3f} s  {kind.removesuffix('_time')}  {facts(event, kind)}".rstrip()


def facts(event: Event, kind: str) -> str:
    """An event's fields, with those of its decision."""
    decision = event.get("retention")
    flat = event | (decision if isinstance(decision, dict) else {})
    short = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in flat.items()}
    left_out = (kind, "retention")
    return ", ".join(f"{n} {v}" for n, v in short.items() if n not in left_out and v not in (None, "", []))


def files(path: Path) -> list[Path]:
    """The files to read: the file itself, or one per rank from a directory."""
    if path.is_file():
        return [path]
    found = sorted(file for file in path.glob("scheduler_timestamps*") if FILE_NAME.fullmatch(file.name))
    if not found:
        raise TraceError(f"{path}: no recording here; expected a file or directory of scheduler_timestamps")
    return found


def contents(file: Path) -> dict[str, Any]:
    """The file's JSON object: {program: [event, ...]}."""
    try:
        jobs = json.loads(file.read_text(encoding="utf-8", errors="replace"))
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{file}: not JSON: {error}; was it cut while being written?") from error
    if not isinstance(jobs, dict):
        raise TraceError(f"{file}: expected an object of event lists by program, not {jobs!r:.80}")
    return jobs


def header(file: Path, found: Any) -> Event:
    """The recording's properties; a file without them, or of another format, is refused."""
    head = found[0] if isinstance(found, list) and found and isinstance(found[0], dict) else {}
    if head.get("format") != FORMAT or not is_number(head.get("dropped")):
        raise TraceError(
            f"{file}: recording format {head.get('format')!r:.80}, and this version reads format {FORMAT}; "
            "record the run again, or read the file with the version that wrote it"
        )
    return head


def events(file: Path, jobs: dict[str, Any]) -> Iterator[tuple[str, Event, str]]:
    """Each event with its program and its place in the file."""
    for name, listed in jobs.items():
        if not isinstance(listed, list):
            raise TraceError(f"{file}: program {name!r} is not a list of events")
        for number, event in enumerate(listed, 1):
            where = f"{file}: program {name!r}, event {number}"
            if not isinstance(event, dict):
                raise TraceError(f"{where}: {event!r:.80} is not an event; expected an object")
            yield name, event, where


def checked(event: Event, where: str) -> Iterator[tuple[str, float]]:
    """The event's name and time, if it is one that is read. Raises TraceError for a wrong field."""
    for kind in FIELDS.keys() & event.keys():
        for name, (expected, holds) in {kind: NUMBER, **FIELDS[kind]}.items():
            if name not in event or not holds(event[name]):
                raise TraceError(f"{where}: {name} is {event.get(name)!r:.80}; it must be {expected}")
        yield kind, event[kind]
