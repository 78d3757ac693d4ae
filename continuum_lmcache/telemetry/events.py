"""Frozen events of programs, turns and pins, and their subscribers.

The owner of a piece of state publishes; recorder, metrics and trackers subscribe. No publisher calls them by
name, and subscribers return nothing: the parts that decide are called directly. Times
are on the engine's clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from continuum_lmcache.programs.divergence import PrefixLoss
from continuum_lmcache.types import Pin, PinEnd, ProgramId, Residency, Retention, ToolKey, TurnId


@dataclass(frozen=True, slots=True)
class TurnArrived:
    """A program's turn joined the queue. `gap_s`: the duration of its tool call; None: there was none."""

    now_s: float
    program: ProgramId
    turn: TurnId
    prompt_tokens: int
    tool: ToolKey = ()
    gap_s: float | None = None
    tenant: str = ""  # identity.tenant_of


@dataclass(frozen=True, slots=True)
class TurnStarted:
    """A program's turn left the queue for the first time, or again (`resumed`) after a preemption.

    `served`: where its prompt came from. `evicted`: the GPU had lost more of its context than a partial
    block, so T (eq. 2) includes this delay.
    """

    now_s: float
    program: ProgramId
    turn: TurnId
    served: Residency
    queue_delay_s: float
    evicted: bool = False
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class TurnPreempted:
    """A running turn lost its memory and waits again."""

    now_s: float
    program: ProgramId
    turn: TurnId


@dataclass(frozen=True, slots=True)
class TurnFinished:
    """A turn ended. `retention`: the policy's decision on its KV. `first_token_s`: from its arrival to its
    first token. None: there was none."""

    now_s: float
    program: ProgramId
    turn: TurnId
    tool: ToolKey
    context_tokens: int
    output_tokens: int
    is_last: bool
    retention: Retention | None = None
    first_token_s: float | None = None


@dataclass(frozen=True, slots=True)
class PinTaken:
    """A finished turn's blocks stay on the GPU."""

    now_s: float
    pin: Pin

    @property
    def program(self) -> ProgramId:
        return self.pin.program


@dataclass(frozen=True, slots=True)
class PinRenewed:
    """A pin's deadline changed."""

    now_s: float
    program: ProgramId
    deadline_s: float


@dataclass(frozen=True, slots=True)
class PinReleased:
    """A pin ended."""

    now_s: float
    program: ProgramId
    why: PinEnd


@dataclass(frozen=True, slots=True)
class ProgramEnded:
    """A program ended or was dropped. `turns`: how many it had."""

    now_s: float
    program: ProgramId
    turns: int


@dataclass(frozen=True, slots=True)
class PrefixLost:
    """A returning program found less than its last turn left."""

    now_s: float
    program: ProgramId
    turn: TurnId
    loss: PrefixLoss


E = TypeVar("E")


class EventBus:
    """Calls the subscribers of an event's type, in the order in which they subscribed."""

    def __init__(self) -> None:
        self._subscribers: dict[type[Any], list[Callable[[Any], None]]] = {}

    def subscribe(self, kind: type[E], listener: Callable[[E], None]) -> None:
        """Have `listener` called with every event of this type."""
        self._subscribers.setdefault(kind, []).append(listener)

    def publish(self, event: object) -> None:
        """Call all subscribers of this type."""
        for listener in self._subscribers.get(type(event), ()):
            listener(event)
