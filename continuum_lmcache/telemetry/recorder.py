"""Records what happened to every program and when, in bounded memory, for one run.

Events have the names of the public prototype's file `scheduler_timestamps` (Continuum, arXiv 2511.02230;
its readers skip what they do not know), and additions: docs/recording.md has the schema. No prompt text is
passed to it. Times are arguments on the engine's clock, files have wall time.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from typing import Any

from continuum_lmcache.bounded_dict import BoundedDict
from continuum_lmcache.errors import InvariantError
from continuum_lmcache.telemetry import events as event_types
from continuum_lmcache.types import Retention, TurnId

Event = dict[str, Any]

FORMAT = 2
META = "_recording"  # the file's one entry that is no program: a list, like every entry
MAX_NAME_CHARS = 200  # ids and tool keys come from clients: longer ones are cut
EXPLANATION = tuple(f.name for f in fields(Retention))


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

    def record(self, event: event_types.Event) -> None:
        """Record one event of events.py, under the public prototype's name for it. Some have none."""
        write = RECORDED.get(type(event))
        if write is not None:
            write(self, event)

    def _arrived(self, e: event_types.TurnArrived) -> None:
        self._add(e, "Request_arrival_time", e.turn, prompt_length=e.prompt_tokens)

    def _started(self, e: event_types.TurnStarted) -> None:
        self._add(
            e,
            "evicted_to_running" if e.resumed else "waiting_to_running",
            e.turn,
            prompt_length=e.served.total_tokens,
            hit_length=e.served.total_tokens - e.served.recompute_tokens,
            gpu_tokens=e.served.gpu_tokens,
            dram_tokens=e.served.dram_tokens,
            ssd_tokens=e.served.ssd_tokens,
            queue_delay_s=plain(e.queue_delay_s),
            kv_evicted=e.evicted,
        )

    def _preempted(self, e: event_types.TurnPreempted) -> None:
        self._add(e, "Request_evicted_from_running_queue_time", e.turn)

    def _finished(self, e: event_types.TurnFinished) -> None:
        """The policy's decision is recorded also if its TTL is 0."""
        self._add(
            e,
            "Request_departure_time",
            e.turn,
            tool=[name[:MAX_NAME_CHARS] for name in e.tool],
            context_tokens=e.context_tokens,
            output_tokens=e.output_tokens,
            first_token_s=e.first_token_s,
            last=e.is_last,
            retention=explained(e.retention) if e.retention else None,
        )

    def _lost(self, e: event_types.PrefixLost) -> None:
        loss = e.loss
        self._add(
            e, "lost_time", e.turn, cause=loss.cause.value, at_token=loss.at_token, lost_tokens=loss.tokens
        )

    def _pinned(self, e: event_types.PinTaken) -> None:
        deadline, ttl_s = plain(self._wall_s(e.pin.deadline_s)), plain(e.pin.retention.ttl_s)
        self._add(e, "pinned_time", deadline=deadline, ttl_s=ttl_s, blocks=e.pin.blocks)

    def _renewed(self, e: event_types.PinRenewed) -> None:
        self._add(e, "renewed_time", deadline=plain(self._wall_s(e.deadline_s)))

    def _unpinned(self, e: event_types.PinReleased) -> None:
        self._add(e, "unpinned_time", outcome=e.why.value)

    def _ended(self, e: event_types.ProgramEnded) -> None:
        self._add(e, "ended_time")

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

    def _add(self, of: Any, kind: str, turn: TurnId | None = None, **facts: Any) -> None:
        event: Event = {kind: self._wall_s(of.now_s)}
        if turn is not None:
            event["turn"] = self._name(turn)
        name = self._name(of.program)  # before the oldest event is dropped: a bad id changes nothing
        if len(self._events) >= self.max_events:
            oldest, _ = self._events.popleft()
            self._missing[oldest] = self._missing.get(oldest, 0) + 1
            self._dropped += 1
        self._events.append((name, event | facts))

    def _name(self, name: str) -> str:
        """A program's or turn's name in the file: bounded, hashed if configured, never META."""
        if not isinstance(name, str):
            raise InvariantError(f"recorder: {name!r} is no id; a turn without a program has no history")
        if self.hash_ids:
            return self._digest(name)
        if len(name) > MAX_NAME_CHARS:
            return f"{name[:MAX_NAME_CHARS]}~{self._digest(name)}"
        return f"_{name}" if name.startswith("_") and name.lstrip("_") == META.lstrip("_") else name

    def _digest(self, name: str) -> str:
        return digest(name, self.salt if self.hash_ids else b"")

    def _wall_s(self, now_s: float) -> float:
        return round(now_s + self.epoch_s, 6)


RECORDED: Mapping[type, Callable[[EventRecorder, Any], None]] = {
    event_types.TurnArrived: EventRecorder._arrived,
    event_types.TurnStarted: EventRecorder._started,
    event_types.TurnPreempted: EventRecorder._preempted,
    event_types.TurnFinished: EventRecorder._finished,
    event_types.PinTaken: EventRecorder._pinned,
    event_types.PinRenewed: EventRecorder._renewed,
    event_types.PinReleased: EventRecorder._unpinned,
    event_types.PrefixLost: EventRecorder._lost,
    event_types.ProgramEnded: EventRecorder._ended,
}


def digest(text: str, salt: bytes = b"") -> str:
    """Sixteen hex digits, a hash of a text."""
    encoded = text.encode("utf-8", "surrogatepass")  # JSON can contain lone surrogates
    return blake2b(encoded, digest_size=8, key=salt).hexdigest()


def explained(retention: Retention) -> Mapping[str, object]:
    """A decision with all numbers that it depends on."""
    return {name: plain(getattr(retention, name)) for name in EXPLANATION}


def plain(value: object) -> object:
    """A value that JSON has: no infinity and no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
