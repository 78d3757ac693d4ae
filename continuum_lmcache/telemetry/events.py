"""What happened to programs, turns and pins, and what was decided: frozen values, in order.

The engine returns them. The scheduler carries out those that are decisions; the recorder and the metrics read
the same list. Times are on the engine's clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from continuum_lmcache.programs.divergence import PrefixLoss
from continuum_lmcache.types import (
    Pin,
    PinEnd,
    Place,
    ProgramId,
    Residency,
    Retention,
    Start,
    ToolKey,
    TurnId,
)


@dataclass(frozen=True, slots=True)
class Event:
    """What all have: each is of a program."""

    now_s: float
    program: ProgramId


@dataclass(frozen=True, slots=True)
class TurnEvent(Event):
    """One of a turn."""

    turn: TurnId


@dataclass(frozen=True, slots=True)
class TurnArrived(TurnEvent):
    """A program's turn joined the queue. `gap_s`: the duration of its tool call; None: there was none."""

    prompt_tokens: int
    tool: ToolKey = ()
    gap_s: float | None = None


@dataclass(frozen=True, slots=True)
class TurnStarted(TurnEvent):
    """A program's turn left the queue for the first time, or again (`resumed`) after a preemption.

    `served`: where its prompt came from. `evicted`: the GPU had lost more of its context than a partial
    block, so T (eq. 2) includes this delay.
    """

    served: Residency
    queue_delay_s: float
    evicted: bool = False
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class TurnPreempted(TurnEvent):
    """A running turn lost its memory and waits again."""


@dataclass(frozen=True, slots=True)
class TurnFinished(TurnEvent):
    """A turn ended. `retention`, `place`: what the policy decided. `first_token_s`: from its arrival to its
    first token. None: there was none."""

    tool: ToolKey
    context_tokens: int
    output_tokens: int
    is_last: bool
    retention: Retention | None = None
    first_token_s: float | None = None
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class ProgramEnded(Event):
    """A program ended or was dropped. `turns`: how many it had."""

    turns: int


@dataclass(frozen=True, slots=True)
class PrefixLost(TurnEvent):
    """A returning program found less than its last turn left."""

    loss: PrefixLoss


# decisions, which the scheduler carries out --------------------------------


@dataclass(frozen=True, slots=True)
class ProgramAdmitted(TurnEvent):
    """A program in line may start: its turn takes its place in the queue."""

    start: Start


@dataclass(frozen=True, slots=True)
class ProgramHeld(TurnEvent):
    """A program in line may not start yet, or waits for another reason now."""

    start: Start
    behind: ProgramId | None = None  # the first in line, if it is another one


@dataclass(frozen=True, slots=True)
class PinTaken(Event):
    """Hold a reference on each of a finished turn's blocks."""

    pin: Pin


@dataclass(frozen=True, slots=True)
class PinRenewed(Event):
    """A pin's deadline changed."""

    deadline_s: float


@dataclass(frozen=True, slots=True)
class PinReleased(Event):
    """A pin ended: drop its references, the last block's first, so that the prefix is evicted last."""

    why: PinEnd
    block_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class EvictFirst(TurnEvent):
    """The KV of the turn's own tokens, after its first `shared_tokens`, is hardly needed again."""

    shared_tokens: int
