"""Records what happened to every program and when, in bounded memory, for one run.

Events have the names of the public prototype's file `scheduler_timestamps` (Continuum, arXiv 2511.02230;
its readers skip what they do not know), and additions: docs/report.md has the schema. No prompt text is
passed to it. Times are arguments on the engine's clock, files have wall time.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import Any

from continuum_lmcache.bounded_dict import BoundedDict
from continuum_lmcache.telemetry import events
from continuum_lmcache.types import Start, TurnId

Event = dict[str, Any]

FORMAT = 2
META = "_recording"  # the file's one entry that is no program: a list, like every entry
MAX_NAME_CHARS = 200  # ids and tool keys come from clients: longer ones are cut


@dataclass(slots=True)
class EventRecorder:
    """The last `max_events` events of a run.

    The oldest go first. Of a program that lost events, the file says how many are missing.
    """

    epoch_s: float  # wall clock minus engine clock
    about: Mapping[str, str] = field(default_factory=dict)  # what runs: model, policy, machine, versions
    hash_ids: bool = False  # write programs and turns as short hashes
    max_events: int = 200_000  # about 100 MB
    salt: bytes = field(default_factory=lambda: secrets.token_bytes(16), repr=False)  # up to 64 bytes
    _events: deque[tuple[str, Event]] = field(default_factory=deque)  # with the program's name
    _missing: BoundedDict[str, int] = field(init=False)  # events that were dropped, by program
    _dropped: int = 0

    def __post_init__(self) -> None:
        self._missing = BoundedDict(self.max_events)

    def record(self, event: events.Event) -> None:
        """Record one event of events.py, under the public prototype's name for it. Some have none."""
        match event:
            case events.TurnArrived():
                self._add(event, "Request_arrival_time", event.turn, prompt_length=event.prompt_tokens)
            case events.TurnStarted(served=served):
                self._add(
                    event,
                    "evicted_to_running" if event.resumed else "waiting_to_running",
                    event.turn,
                    prompt_length=served.total_tokens,
                    hit_length=served.total_tokens - served.recompute_tokens,
                    gpu_tokens=served.gpu_tokens,
                    dram_tokens=served.dram_tokens,
                    ssd_tokens=served.ssd_tokens,
                    queue_delay_s=plain(event.queue_delay_s),
                    kv_evicted=event.evicted,
                )
            case events.TurnPreempted():
                self._add(event, "Request_evicted_from_running_queue_time", event.turn)
            case events.TurnFinished(retention=keep, place=place):  # recorded also if the TTL is 0
                self._add(
                    event,
                    "Request_departure_time",
                    event.turn,
                    tool=[name[:MAX_NAME_CHARS] for name in event.tool],
                    context_tokens=event.context_tokens,
                    output_tokens=event.output_tokens,
                    first_token_s=event.first_token_s,
                    last=event.is_last,
                    retention={name: plain(value) for name, value in asdict(keep).items()} if keep else None,
                    place={"kept": place.is_kept, "reason": place.reason} if place else None,
                )
            case events.PrefixLost(loss=loss):
                facts = {"cause": loss.cause.value, "at_token": loss.at_token, "lost_tokens": loss.tokens}
                self._add(event, "lost_time", event.turn, **facts)
            case events.PinTaken(pin=pin):
                deadline, ttl_s = plain(self._wall_s(pin.deadline_s)), plain(pin.retention.ttl_s)
                self._add(event, "pinned_time", deadline=deadline, ttl_s=ttl_s, blocks=pin.blocks)
            case events.PinRenewed():
                self._add(event, "renewed_time", deadline=plain(self._wall_s(event.deadline_s)))
            case events.PinReleased():
                self._add(event, "unpinned_time", outcome=event.why.value)
            case events.ProgramEnded():
                self._add(event, "ended_time")
            case events.ProgramHeld(start=start):
                behind = self.name(event.behind) if event.behind is not None else None
                self._add(event, "held_time", event.turn, **self._of_start(start), behind=behind)
            case events.ProgramAdmitted(start=start):
                self._add(event, "admitted_time", event.turn, **self._of_start(start))

    @staticmethod
    def _of_start(start: Start) -> Event:
        tokens = {"need_tokens": start.need_tokens, "room_tokens": start.room_tokens}
        return {"reason": start.reason, **{name: round(count) for name, count in tokens.items()}}

    def snapshot(self) -> dict[str, list[Event]]:
        """All events, ready for JSON: {program: [event, ...]}, with META's entry first.

        Lists are copies; events are shared and never change. Safe in a signal handler.
        """
        header = {"format": FORMAT, "hashed_ids": self.hash_ids, "dropped": self._dropped, **self.about}
        found: dict[str, list[Event]] = {META: [header]}
        for name, event in self._events.copy():
            found.setdefault(name, []).append(event)
        for name, count in list(self._missing.items()):
            if name in found:
                found[name].append({"events_dropped": count})
        return found

    def _add(self, of: events.Event, kind: str, turn: TurnId | None = None, **facts: Any) -> None:
        event: Event = {kind: self._wall_s(of.now_s)}
        if turn is not None:
            event["turn"] = self.name(turn)
        if len(self._events) >= self.max_events:
            oldest, _ = self._events.popleft()
            self._missing[oldest] = self._missing.get(oldest, 0) + 1
            self._dropped += 1
        self._events.append((self.name(of.program), event | facts))

    def name(self, name: str) -> str:
        """A program's or turn's name in the file: bounded, hashed if configured, never META."""
        if self.hash_ids:
            return digest(name, self.salt)
        if len(name) > MAX_NAME_CHARS:
            return f"{name[:MAX_NAME_CHARS]}~{digest(name)}"
        return f"_{name}" if name.startswith("_") and name.lstrip("_") == META.lstrip("_") else name

    def _wall_s(self, now_s: float) -> float:
        return round(now_s + self.epoch_s, 6)


def digest(text: str, salt: bytes = b"") -> str:
    """Sixteen hex digits, a hash of a text."""
    encoded = text.encode("utf-8", "surrogatepass")  # JSON can contain lone surrogates
    return blake2b(encoded, digest_size=8, key=salt).hexdigest()


def plain(value: object) -> object:
    """A value that JSON has: no infinity and no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
