"""One program's events as values: turns, gaps and pins.

The public prototype's events name no turn: each goes to the earliest turn that still lacks it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from continuum_lmcache.telemetry.recorder import Event


@dataclass(slots=True)
class RecordedPin:
    """One pin. Times on the wall clock; None: the recording lacks it."""

    taken_s: float
    ended_s: float | None = None
    outcome: str | None = None
    blocks: int | None = None


@dataclass(frozen=True, slots=True)
class RecordedLoss:
    """KV that its program had left and a turn computed again, and why (divergence.py)."""

    cause: str
    at_token: int
    left_tokens: int  # of the turn before
    tokens: int
    prefill_s: float
    sides: tuple[str, ...] = ()  # the tokens there, before and now: text, else hashes


@dataclass(slots=True)
class RecordedTurn:
    """One turn. Times on the wall clock; None: it did not happen, or the recording lacks it."""

    arrival_s: float
    prompt_tokens: int | None = None
    started_s: float | None = None
    hit_tokens: int | None = None
    gpu_tokens: int | None = None
    dram_tokens: int | None = None
    ssd_tokens: int | None = None
    queue_delay_s: float | None = None
    departure_s: float | None = None
    output_tokens: int | None = None
    tool: tuple[str, ...] | None = None
    retention: Mapping[str, Any] | None = None
    preemptions: int = 0
    losses: list[RecordedLoss] = field(default_factory=list)
    pin: RecordedPin | None = None
    went_idle: bool = False  # the program had no other turn when this one departed
    gap_s: float | None = None  # from then to the program's next turn


@dataclass(slots=True)
class RecordedProgram:
    """One program, built from its events in the order in which they happened."""

    id: str
    turns: list[RecordedTurn] = field(default_factory=list)  # by arrival
    pins: list[RecordedPin] = field(default_factory=list)
    ended_s: float | None = None
    events_dropped: int = 0
    unmatched: Counter[str] = field(default_factory=Counter)  # events that belong to no turn
    _live: list[RecordedTurn] = field(default_factory=list)
    _by_id: dict[str, RecordedTurn] = field(default_factory=dict)
    _last: RecordedTurn | None = None  # the last that departed

    @property
    def complete(self) -> bool:
        """No event was dropped, and every turn departed."""
        return bool(self.turns) and not self._live and not self.events_dropped

    def arrived(self, event: Event, time_s: float) -> None:
        if self._last is not None and self._last.departure_s is not None and not self._live:
            self._last.gap_s = round(time_s - self._last.departure_s, 6)
        turn = RecordedTurn(time_s, event.get("prompt_length"))
        self.turns.append(turn)
        self._live.append(turn)
        if "turn" in event:
            self._by_id[event["turn"]] = turn

    def started(self, event: Event, time_s: float) -> None:
        waiting = [t for t in self._of(event) if t.started_s is None]
        if not waiting:
            self.unmatched["waiting_to_running"] += 1
            return
        turn = waiting[0]
        turn.started_s = time_s
        turn.prompt_tokens = event.get("prompt_length", turn.prompt_tokens)
        turn.hit_tokens = event.get("hit_length")
        turn.gpu_tokens, turn.dram_tokens = event.get("gpu_tokens"), event.get("dram_tokens")
        turn.ssd_tokens, turn.queue_delay_s = event.get("ssd_tokens"), event.get("queue_delay_s")

    def preempted(self, event: Event, time_s: float) -> None:  # noqa: ARG002
        for turn in [t for t in self._of(event) if t.started_s is not None][:1]:
            turn.preemptions += 1

    def resumed(self, event: Event, time_s: float) -> None:
        """After a preemption: tokens found then are no hit of the program's return."""

    def departed(self, event: Event, time_s: float) -> None:
        leaving = self._of(event)
        if not leaving:
            self.unmatched["Request_departure_time"] += 1
            return
        turn = leaving[0]
        self._live.remove(turn)
        turn.departure_s, turn.output_tokens = time_s, event.get("output_tokens")
        turn.tool = tuple(event["tool"]) if "tool" in event else None
        turn.retention, turn.went_idle = event.get("retention"), not self._live
        self._last = turn

    def lost(self, event: Event, time_s: float) -> None:  # noqa: ARG002
        turn = self._by_id.get(event.get("turn", ""))
        numbers = [event.get(key) for key in ("at_token", "left_tokens", "lost_tokens", "prefill_s")]
        if turn is None or None in (*numbers, event.get("cause")):
            self.unmatched["lost_time"] += 1
            return
        kind = "text" if "now_text" in event else "side"
        sides = [event.get(f"{which}_{kind}") for which in ("left", "now")]
        shown = tuple(str(side) for side in sides if side is not None)
        turn.losses.append(RecordedLoss(event["cause"], *numbers, shown))  # type: ignore[arg-type, call-arg]

    def pinned(self, event: Event, time_s: float) -> None:
        pin = RecordedPin(time_s, blocks=event.get("blocks"))
        self.pins.append(pin)
        if self._last is not None:
            self._last.pin = pin

    def unpinned(self, event: Event, time_s: float) -> None:
        held = [p for p in self.pins[-1:] if p.ended_s is None]
        if not held:
            self.unmatched["unpinned_time"] += 1
            return
        held[0].ended_s, held[0].outcome = time_s, event.get("outcome")

    def ended(self, event: Event, time_s: float) -> None:  # noqa: ARG002
        self.ended_s = time_s

    def _of(self, event: Event) -> list[RecordedTurn]:
        """The live turns that an event may belong to, earliest first."""
        if "turn" not in event:
            return self._live
        turn = self._by_id.get(event["turn"])
        return [turn] if turn is not None and turn.departure_s is None else []


KINDS = {
    "Request_arrival_time": RecordedProgram.arrived,
    "waiting_to_running": RecordedProgram.started,
    "Request_evicted_from_running_queue_time": RecordedProgram.preempted,
    "evicted_to_running": RecordedProgram.resumed,
    "Request_departure_time": RecordedProgram.departed,
    "lost_time": RecordedProgram.lost,
    "pinned_time": RecordedProgram.pinned,
    "unpinned_time": RecordedProgram.unpinned,
    "ended_time": RecordedProgram.ended,
}
