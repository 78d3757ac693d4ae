"""What happened to every program and when, in bounded memory: the memory of one run.

Events lie by program, oldest first, under the names of the public prototype's file
`scheduler_timestamps` (Continuum, arXiv 2511.02230; its readers skip what they do not know), with
what that file lacked: docs/recording.md is the schema. No prompt text ever comes here. Times are
arguments on the engine's clock, files hold wall time.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from typing import Any, Protocol

from continuum_lmcache.errors import ConfigError, InvariantError
from continuum_lmcache.programs.divergence import PrefixLoss
from continuum_lmcache.reload.forecast_tracker import ReloadOutcome
from continuum_lmcache.telemetry import events as happened
from continuum_lmcache.types import Pin, PinEnd, ProgramId, Residency, Retention, ToolKey, TurnId

Event = dict[str, Any]

FORMAT = 1
META = "_recording"  # the file's one entry that is no program: a list, as every entry is
MAX_NAME_CHARS = 200  # ids and tool keys come from clients: longer ones are cut
EXPLANATION = tuple(f.name for f in fields(Retention))


class EventSink(Protocol):
    """Takes events away while the engine runs."""

    def write(self, event: Event) -> None:
        """Keep one event, with its program under "job_id". Must neither block, raise nor change it."""


@dataclass(slots=True)
class ProgramEvents:
    """One program's events, and how many more there were."""

    events: list[Event] = field(default_factory=list)
    preempted: set[TurnId] = field(default_factory=set)  # and not running again yet
    dropped: int = 0


@dataclass(slots=True)
class EventRecorder:
    """Events of at most `max_programs` programs and about `max_events` events.

    Beyond that the history of the program not heard of for longest goes, whole; of a program with
    too many events the first ones stay. `dropped` counts both. A sink sees every event regardless.
    """

    epoch_s: float  # wall clock minus engine clock
    max_programs: int = 10_000
    max_events_per_program: int = 5_000
    hash_ids: bool = False  # write programs and turns as short hashes
    max_events: int = 200_000  # about 100 MB
    salt: bytes = field(default_factory=lambda: secrets.token_bytes(16), repr=False)  # up to 64 bytes
    sink: EventSink | None = None
    dropped: Counter[str] = field(default_factory=Counter)  # "programs", "events"
    _histories: OrderedDict[str, ProgramEvents] = field(default_factory=OrderedDict)  # idle longest first
    _held: int = 0

    def __post_init__(self) -> None:
        for name in ("max_programs", "max_events_per_program", "max_events"):
            if getattr(self, name) < 1:
                raise ConfigError(f"recorder: {name} is {getattr(self, name)}; it must be at least 1")

    def listen(self, events: happened.EventBus) -> None:
        """Record what happens."""
        on = events.subscribe
        on(happened.TurnArrived, lambda e: self.arrived(e.now_s, e.program, e.turn, e.prompt_tokens))
        on(
            happened.TurnStarted,
            lambda e: self.started(e.now_s, e.program, e.turn, e.served, e.queue_delay_s, e.evicted),
        )
        on(happened.TurnPreempted, lambda e: self.preempted(e.now_s, e.program, e.turn))
        on(happened.TurnFinished, self._turn_finished)
        on(happened.PinTaken, lambda e: self.pinned(e.now_s, e.pin))
        on(happened.PinRenewed, lambda e: self.renewed(e.now_s, e.program, e.deadline_s))
        on(happened.PinReleased, lambda e: self.unpinned(e.now_s, e.program, e.why))
        on(happened.PrefixLost, lambda e: self.lost(e.now_s, e.program, e.turn, e.loss, e.texts))
        on(happened.ContextReloaded, lambda e: self.reloaded(e.now_s, e.outcome))
        on(happened.ProgramEnded, self._program_ended)

    def _turn_finished(self, e: happened.TurnFinished) -> None:
        sizes = (e.context_tokens, e.output_tokens)
        self.finished(e.now_s, e.program, e.turn, e.tool, *sizes, e.is_last, e.retention)

    def _program_ended(self, e: happened.ProgramEnded) -> None:
        if e.turns is not None:
            self.ended(e.now_s, e.program)

    def arrived(self, now_s: float, program: ProgramId, turn: TurnId, prompt_tokens: int) -> None:
        """A turn joined the queue."""
        self._histories.setdefault(self._name(program), ProgramEvents())
        self._add(now_s, program, "Request_arrival_time", turn, prompt_length=prompt_tokens)

    def started(
        self,
        now_s: float,
        program: ProgramId,
        turn: TurnId,
        served: Residency,
        queue_delay_s: float,
        evicted: bool,
    ) -> None:
        """A turn left the queue; `served` is where its prompt's KV really came from.

        `evicted`: its program had KV on the GPU once and lost it, so this delay counts in T
        (§3.2). A turn that was preempted before is named as the prototype names it.
        """
        history = self._histories.get(self._name(program))
        resumed = history is not None and turn in history.preempted
        if history is not None:
            history.preempted.discard(turn)
        self._add(
            now_s,
            program,
            "evicted_to_running" if resumed else "waiting_to_running",
            turn,
            prompt_length=served.total_tokens,
            hit_length=served.total_tokens - served.recompute_tokens,
            gpu_tokens=served.gpu_tokens,
            dram_tokens=served.dram_tokens,
            ssd_tokens=served.ssd_tokens,
            queue_delay_s=plain(queue_delay_s),
            kv_evicted=evicted,
        )

    def preempted(self, now_s: float, program: ProgramId, turn: TurnId) -> None:
        """A running turn lost its place and goes back to the queue."""
        if self._add(now_s, program, "Request_evicted_from_running_queue_time", turn):
            self._histories[self._name(program)].preempted.add(turn)

    def finished(
        self,
        now_s: float,
        program: ProgramId,
        turn: TurnId,
        tool: ToolKey,
        context_tokens: int,
        output_tokens: int,
        last: bool,
        retention: Retention | None,
    ) -> None:
        """A turn ended, calling `tool`; `retention` is what the policy said, also where it said 0."""
        if history := self._histories.get(self._name(program)):
            history.preempted.discard(turn)
        self._add(
            now_s,
            program,
            "Request_departure_time",
            turn,
            tool=[name[:MAX_NAME_CHARS] for name in without_argument(tool, self._digest)],
            context_tokens=context_tokens,
            output_tokens=output_tokens,
            last=last,
            retention=explained(retention) if retention else None,
        )

    def reloaded(self, now_s: float, found: ReloadOutcome) -> None:
        """A turn whose context the GPU had lost has it back: what that was foretold to cost, and cost."""
        self._add(
            now_s,
            found.program,
            "reloaded_time",
            found.turn,
            foretold_s=plain(found.foretold_s),
            took_s=plain(found.took_s),
            load_s=plain(found.load_s),
            loaded_tokens=found.loaded_tokens,
            computed_tokens=found.computed_tokens,
        )

    def lost(
        self, now_s: float, program: ProgramId, turn: TurnId, loss: PrefixLoss, texts: Sequence[str] = ()
    ) -> None:
        """A program came back to less than it left. What stood on both sides is a salted hash, and its text
        only if given.
        """
        sides = {"left_side": loss.left_side, "now_side": loss.now_side} if loss.now_side else {}
        self._add(
            now_s,
            program,
            "lost_time",
            turn,
            cause=loss.cause.value,
            at_token=loss.at_token,
            left_tokens=loss.left_tokens,
            lost_tokens=loss.tokens,
            prefill_s=plain(loss.seconds),
            **{name: digest(str(tokens), self.salt) for name, tokens in sides.items()},
            **dict(zip(("left_text", "now_text"), texts if sides else (), strict=False)),
        )

    def pinned(self, now_s: float, pin: Pin) -> None:
        """A finished turn's blocks stay on the GPU."""
        deadline = plain(self._wall_s(pin.deadline_s))
        ttl_s = plain(pin.retention.ttl_s)
        self._add(now_s, pin.program, "pinned_time", deadline=deadline, ttl_s=ttl_s, blocks=pin.blocks)

    def renewed(self, now_s: float, program: ProgramId, deadline_s: float) -> None:
        """The program's pin was looked at again and ends at another time."""
        self._add(now_s, program, "renewed_time", deadline=plain(self._wall_s(deadline_s)))

    def unpinned(self, now_s: float, program: ProgramId, outcome: PinEnd) -> None:
        """The program's pin is over."""
        self._add(now_s, program, "unpinned_time", outcome=outcome.value)

    def ended(self, now_s: float, program: ProgramId) -> None:
        """The program is over, as far as anybody knows."""
        self._add(now_s, program, "ended_time")

    def snapshot(self) -> dict[str, list[Event]]:
        """Everything held, ready for JSON: {program: [event, ...]}, and META's one entry first.

        Lists are copies, events are shared and never change. Safe from a signal handler.
        """
        found: dict[str, list[Event]] = {META: [self.header()]}
        for name, history in list(self._histories.items()):
            cut = [{"events_dropped": history.dropped}] if history.dropped else []
            found[name] = [*history.events, *cut]
        return found

    def header(self) -> Event:
        """What a reader must know about the recording itself."""
        return {"format": FORMAT, "hashed_ids": self.hash_ids, "dropped": dict(self.dropped)}

    def _add(
        self, now_s: float, program: ProgramId, kind: str, turn: TurnId | None = None, **facts: Any
    ) -> bool:
        """Record one event. False: the bounds keep it out."""
        name = self._name(program)
        event: Event = {kind: self._wall_s(now_s)}
        if turn is not None:
            event["turn"] = self._name(turn)
        event |= facts
        if self.sink is not None:
            self.sink.write({"job_id": name, **event})
        history = self._histories.get(name)
        if history is None:  # it was discarded: a history without its beginning would mislead
            self.dropped["events"] += 1
            return False
        self._histories.move_to_end(name)
        if len(history.events) >= self.max_events_per_program:
            history.dropped += 1
            self.dropped["events"] += 1
            return False
        history.events.append(event)
        self._held += 1
        self._make_room()
        return True

    def _make_room(self) -> None:
        while len(self._histories) > self.max_programs or (
            self._held > self.max_events and len(self._histories) > 1
        ):
            _, history = self._histories.popitem(last=False)
            self._held -= len(history.events)
            self.dropped["programs"] += 1
            self.dropped["events"] += len(history.events)

    def _name(self, name: str) -> str:
        """A program's or turn's name in the file: bounded, hashed if asked, never META."""
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


class DisabledRecorder(EventRecorder):
    """The recorder of a run that nobody asked to record: nothing is held, so nothing is made."""

    def listen(self, events: happened.EventBus) -> None:
        """Hear nothing."""


def without_argument(tool: ToolKey, hashed: Callable[[str], str]) -> ToolKey:
    """A key as files may hold it: the argument of a command, which is the model's own text, is hashed.

    ("pytest tests/unit", "pytest", "bash") -> ("pytest ~1f0c...", "pytest", "bash"): calls with the
    same argument can still be told from others. A name that the client gave is left as it is.
    """
    if len(tool) < 2 or not tool[0].startswith(f"{tool[1]} "):
        return tool
    return (f"{tool[1]} ~{hashed(tool[0][len(tool[1]) + 1 :])}", *tool[1:])


def digest(text: str, salt: bytes = b"") -> str:
    """Sixteen hex digits that stand for a text."""
    encoded = text.encode("utf-8", "surrogatepass")  # JSON can bring lone surrogates
    return blake2b(encoded, digest_size=8, key=salt).hexdigest()


def explained(retention: Retention) -> Mapping[str, object]:
    """A decision with every number that led to it."""
    return {name: plain(getattr(retention, name)) for name in EXPLANATION}


def plain(value: object) -> object:
    """A value that JSON has: no infinity and no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
