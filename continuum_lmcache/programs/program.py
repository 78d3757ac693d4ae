"""What is known of one program: one record, with its stage."""

from __future__ import annotations

import math
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from continuum_lmcache.programs.divergence import no_hashes
from continuum_lmcache.programs.prompt_linker import LinkableTurn
from continuum_lmcache.programs.shared_prefixes import NO_HEAD, SharedPrefix
from continuum_lmcache.types import ProgramId, Residency, ToolKey, TurnId

NOWHERE = Residency(0, 0, 0, 0)
RETURNS_KEPT = 8  # tools: an agent has few
STANDING_KEPT_S = 300.0  # clients give up after so long without a first byte, and send the turn again


class Stage(Enum):
    """What a program does. `ProgramTable.move` alone changes it."""

    __hash__ = object.__hash__  # Enum's own is Python code

    IDLE = "idle"  # its last turn failed or was aborted: the next may come at any time, or never
    IN_LINE = "in line"  # its turn waits until the program may start
    ACTIVE = "active"  # its turn is queued, loading or running
    AWAY = "away"  # in a tool call, expected back until `expected_until_s`
    SINGLE = "single"  # a request without a name: it needs no place, and ends with its turn
    YIELDED = "yielded"  # in a tool call; its slice is over, and others wait for its place
    OVERDUE = "overdue"  # in a tool call, and not expected back any more


class Left(NamedTuple):
    """A program's turn was aborted or failed: where the program stood."""

    stage: Stage
    at_s: float


class Counted(NamedTuple):
    """A program's part of the sums over all programs, in tokens."""

    context_tokens: int = 0  # that it has, without its head
    started_tokens: float = 0.0  # forecast, if it has started
    active_tokens: float = 0.0  # forecast, if its KV must be on the GPU
    head: SharedPrefix = NO_HEAD  # counts once for all that begin with it


NOT_COUNTED = Counted()


@dataclass(slots=True)
class Program:
    """An agent's run: turns of inference with tool calls between them."""

    id: ProgramId
    tenant: str  # whose limits and statistics are its: ProgramFields.owner
    arrival_s: float
    seen_s: float
    placed_s: float  # when it got its place; its arrival where no program waits for one
    order_s: float  # its order among programs: when it came, or last came to wait for a place
    is_one_turn: bool = False  # a request without a program's name: it ends with its turn
    stage: Stage = Stage.IDLE
    turn: TurnId | None = None  # the live one
    is_waiting: bool = False  # that turn has not run yet
    left: Left | None = None  # until its next turn comes
    is_name_shared: bool = False  # other conversations have its name
    strangers: int = 0  # requests with its name, one after the other, that continued nothing
    # its finished turns
    turns: int = 0
    turns_before_place: int = 0  # of these, before it got its place
    attained_tokens: int = 0  # computed for it so far
    tool: ToolKey = ()  # called by the last one
    returned_from: tuple[ToolKey, ...] = ()  # the latest tools, RETURNS_KEPT at most
    finished_s: float | None = None  # when that ended; None if a later one is here
    residency: Residency = NOWHERE  # of its context, below the GPU, when it ended
    reload_s: float = 0.0  # what that context costs after a wait in the line
    hashes: array[int] = field(default_factory=no_hashes)  # of its whole blocks
    linkable: LinkableTurn | None = None  # the last one, which a prompt may continue
    repeated: tuple[float, float, float] = (1.0, 1.0, 1.0)  # shares of their contexts, by the latest returns
    # its place in admission's line
    priority: int = 0
    line_since_s: float = 0.0
    starts_by_s: float = math.inf  # the bound of its wait, from when it came
    held_for: str = ""  # why it waits there, as it was told
    prompt_hashes: Sequence[Hashable] = ()  # of its prompt's whole blocks
    # its size
    context_tokens: int = 0  # now, or of its prompt in the line
    head: SharedPrefix = NO_HEAD
    ended_tokens: int = 0  # of the turn before, if the program was counted since then
    counted: Counted = NOT_COUNTED
    # its tool call
    expected_until_s: float = math.inf
    counts_as_ended: bool = False  # while it is overdue: the statistics have its turns

    @property
    def last_tokens(self) -> int:
        """The context of the last finished turn."""
        return self.residency.total_tokens

    @property
    def repeated_share(self) -> float:
        """How much of its kept contexts its latest returns repeated, 0 to 1."""
        return sum(self.repeated) / len(self.repeated)

    def kept_stage(self, now_s: float) -> Stage | None:
        """Where it stands still, if its last turn left not long ago."""
        left = self.left
        return left.stage if left is not None and now_s - left.at_s <= STANDING_KEPT_S else None

    @property
    def own_tokens(self) -> int:
        """Its context without the shared head."""
        return max(0, self.context_tokens - self.head.tokens)
