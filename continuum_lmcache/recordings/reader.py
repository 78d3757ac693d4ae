"""Reads a recording: what every program did and when. docs/report.md has the format."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from continuum_lmcache.errors import TraceError
from continuum_lmcache.telemetry.recorder import FORMAT, META, Event

FILE_NAME = re.compile(r"scheduler_timestamps(_dp\d+)?")
FACTS = ("model", "policy", "machine", "versions")  # of the header
SOURCES = {"GPU": "gpu_tokens", "DRAM": "dram_tokens", "disk": "ssd_tokens"}
OF_NO_TURN = ("renewed_time", "ended_time", "held_time", "admitted_time")  # and without a figure here
WHY = {  # the reasons of `continuum`, in words; a policy of one's own may have others
    ("held", "no-room"): "waits for room: it would need {need_tokens:,} tokens, and {room_tokens:,} are left",
    ("held", "behind"): "waits for its turn in the line, behind {behind}",
    ("admitted", "room"): "starts: it fits beside the programs with a place",
    ("admitted", "idle"): "starts: the GPU has no other work",
    ("admitted", "few-prompts"): "starts without room: prompts take little of the time",
    ("admitted", "fits-never"): "starts without room: it will never fit, so waiting brings it nothing",
    ("admitted", "promised"): "starts without room: it has waited for as long as was shown when it came",
    ("admitted", "all-wait-alike"): "starts without room: no program keeps a place during its tool",
    ("kept", "nobody-waits"): "keeps its place: nobody waits",
    ("kept", "slice"): "keeps its place: its slice is not over",
    ("kept", "hold"): "keeps its place: no turn would wait for too long",
    ("given-up", "slice-over"): "gives its place up: its slice is over, and a turn would wait for too long",
    ("given-up", "all-wait-alike"): "gives its place up: a place is not worth a tool call",
}
TIMED = ("_time", "_to_running")  # ends of events' names; the time is an event's first field
EARLIEST_S = 1e9  # of a wall clock in a recording: 2001
LAST_S = 1e11  # no wall clock shows more


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    program: str
    where: str  # in the file
    kind: str  # the name of its time
    time_s: float  # wall time; infinite for what is no event (`events_dropped`)
    fields: Event


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

    def add(self, kind: str, time_s: float, event: Event) -> None:
        """Apply one event. What belongs to a turn or pin whose beginning is missing is left out.

        Raises LookupError, TypeError or ValueError for fields that no recorder writes.
        """
        if kind == "events_dropped":
            self.is_cut = True
        elif kind == "Request_arrival_time":
            if self._last is not None and self._last.departure_s is not None and not self._live:
                self._last.gap_s = round(time_s - self._last.departure_s, 6)
            turn = self._live[event["turn"]] = RecordedTurn(time_s, int(event["prompt_length"]))
            self.turns.append(turn)
        elif kind == "pinned_time":
            self.pins.append(RecordedPin(time_s, int(event["blocks"])))
        elif kind == "unpinned_time":
            if self.pins and self.pins[-1].ended_s is None:
                self.pins[-1].ended_s, self.pins[-1].outcome = time_s, str(event["outcome"])
        elif kind not in OF_NO_TURN and (found := self._live.get(event["turn"])) is not None:
            self._change(found, kind, time_s, event)

    def _change(self, turn: RecordedTurn, kind: str, time_s: float, event: Event) -> None:
        if kind == "Request_evicted_from_running_queue_time":
            turn.preemptions += 1
        elif kind == "waiting_to_running":
            turn.started_s, turn.prompt_tokens = time_s, int(event["prompt_length"])
            turn.sources = {place: int(event[name]) for place, name in SOURCES.items()}
            turn.sources["computed"] = max(0, turn.prompt_tokens - sum(turn.sources.values()))
        elif kind == "Request_departure_time":
            del self._live[event["turn"]]
            turn.departure_s, turn.output_tokens = time_s, int(event["output_tokens"])
            if (wait_s := event["first_token_s"]) is not None:
                turn.first_token_s = float(wait_s)
            turn.tool = str((event["tool"] or [""])[0])
            if (decision := event["retention"]) and decision["ttl_s"] is not None:
                turn.ttl_s = float(decision["ttl_s"])
            self._last = turn


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
    heads, found = read(path)
    programs: dict[str, RecordedProgram] = {}
    lost: Counter[str] = Counter()
    for each in found:
        program = programs.setdefault(each.program, RecordedProgram(each.program))
        try:
            program.add(each.kind, each.time_s, each.fields)
            if each.kind == "lost_time":
                lost[str(each.fields["cause"])] += int(each.fields["lost_tokens"])
        except (LookupError, TypeError, ValueError) as error:
            raise TraceError(
                f"{each.where}: {error!r} in {each.fields!r:.200}; no recorder wrote this"
            ) from error
    arrived = sorted((p for p in programs.values() if p.turns), key=lambda p: p.turns[0].arrival_s)
    if not arrived:
        raise TraceError(f"{path}: no program arrived in this recording")
    facts = {name: str(heads[0].get(name, "")) for name in FACTS}
    about = {name: "".join(c for c in fact[:200] if c.isprintable()) for name, fact in facts.items()}
    end_s = max(each.time_s for each in found if each.time_s < math.inf)
    return Recording(str(path), tuple(arrived), end_s, about, dict(lost), sum(h["dropped"] for h in heads))


def story(path: Path, program: str) -> Iterator[str]:
    """A line for each event of a program: seconds since its first, and all that was recorded of it.

    Raises TraceError for a program that is not there.
    """
    found = [each for each in read(path)[1] if each.program == program and each.time_s < math.inf]
    if not found:
        raise TraceError(
            f"{path}: no program {program!r}; names are hashes, unless the server has continuum.record_ids: "
            "the report's timeline lists them"
        )
    for event in found:
        kind, since_s = event.kind.removesuffix("_time"), event.time_s - found[0].time_s
        yield f"{since_s:10.3f} s  {kind}  {facts_of(event)}{why(event)}".rstrip()


def why(event: RecordedEvent) -> str:
    """A sentence on what was decided about the program's place; "" for other events and reasons."""
    place, kind = event.fields.get("place"), event.kind.removesuffix("_time")
    if isinstance(place, dict):
        kind = "kept" if place.get("kept") else "given-up"
    reason = place.get("reason") if isinstance(place, dict) else event.fields.get("reason")
    said = WHY.get((kind, str(reason)), "")
    return f". It {said.format_map(event.fields)}." if said else ""


def facts_of(event: RecordedEvent) -> str:
    decision = event.fields.get("retention")
    flat = event.fields | (decision if isinstance(decision, dict) else {})
    short = {name: shown(value, event.time_s) for name, value in flat.items()}
    left_out = (event.kind, "retention", "place")
    return ", ".join(f"{n} {v}" for n, v in short.items() if n not in left_out and v not in (None, "", []))


def shown(value: object, time_s: float) -> object:
    """A field's value in few digits; of a wall time, how long after the event it is."""
    if not isinstance(value, float):
        return value
    return f"{value - time_s:+.3f} s" if EARLIEST_S < value < LAST_S else f"{round(value, 3):.6g}"


def read(path: Path) -> tuple[list[Event], list[RecordedEvent]]:
    """The headers and all events, in the order of their times, of a file or of a directory with one a rank.

    Raises TraceError.
    """
    in_folder = [each for each in path.glob("scheduler_timestamps*") if FILE_NAME.fullmatch(each.name)]
    files = [path] if path.is_file() else sorted(in_folder)
    if not files:
        raise TraceError(f"{path}: no recording here; expected a file or directory of scheduler_timestamps")
    heads, found = [], list[RecordedEvent]()
    for file in files:
        jobs = contents(file)
        heads.append(header(file, jobs.pop(META, None)))
        found += events(file, jobs)
    return heads, sorted(found, key=attrgetter("time_s"))


def contents(file: Path) -> dict[str, Any]:
    try:
        jobs = json.loads(file.read_text(encoding="utf-8", errors="replace"), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{file}: not JSON: {error}; was it cut while being written?") from error
    if not isinstance(jobs, dict):
        raise TraceError(f"{file}: expected an object of event lists by program, not {jobs!r:.80}")
    return jobs


def header(file: Path, found: Any) -> Event:
    """The recording's properties; a file without them, or of another format, is refused."""
    head = found[0] if isinstance(found, list) and found and isinstance(found[0], dict) else {}
    if head.get("format") != FORMAT or not isinstance(head.get("dropped"), int):
        whose = ", a recording of Continuum's prototype perhaps" if found is None else ""
        raise TraceError(
            f"{file}{whose}: format {head.get('format')!r:.80}, and this version reads format {FORMAT}; "
            "record the run again, or read the file with the version that wrote it"
        )
    return head


def events(file: Path, jobs: dict[str, Any]) -> Iterator[RecordedEvent]:
    for name, listed in jobs.items():
        if not isinstance(listed, list):
            raise TraceError(f"{file}: program {name!r} is not a list of events")
        for number, event in enumerate(listed, 1):
            where = f"{file}: program {name!r}, event {number}"
            if not isinstance(event, dict):
                raise TraceError(f"{where}: {event!r:.80} is not an event; expected an object")
            kind, time_s = next(iter(event.items()), ("", None))
            if not kind.endswith(TIMED):
                time_s = math.inf
            elif not isinstance(time_s, int | float) or not 0 <= time_s < LAST_S:
                raise TraceError(f"{where}: {kind} is {time_s!r:.80}; it must be seconds since 1970")
            yield RecordedEvent(name, where, kind, time_s, event)


def refuse(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
