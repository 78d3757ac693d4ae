"""What a policy is asked, and what it answers: seven decisions as pure functions of frozen values.

A decision that a policy leaves out, None, is not made: every program starts as it comes and keeps its place,
steps are vLLM's own, everything that a tier holds is loaded, nothing is evicted first.
Times are in seconds. A reason is one of few words: metrics count them, recordings have them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from continuum_lmcache.config import ContinuumConfig
from continuum_lmcache.reload.cost_model import CostModel
from continuum_lmcache.reload.load_policy import ToLoad
from continuum_lmcache.steps.step_times import StepTimes
from continuum_lmcache.tools.durations import ToolDurations
from continuum_lmcache.types import FinishedTurn, Place, QueueEntry, Retention, Start

Order = tuple[float, ...]  # a sort key that does not depend on the clock, smallest first


@dataclass(frozen=True, slots=True)
class EngineState:
    """What is known when a turn has ended in a tool call, and when its pin is decided anew."""

    config: ContinuumConfig
    costs: CostModel  # by the rates so far
    gaps: ToolDurations  # that decide for the turn's tenant; read only
    lost_share: float  # of the gaps of the turn's tool: they never ended
    expected_s: float  # for how long a program in such a call is expected back
    reload_s: float  # PrefillReload of the turn's context, if the GPU's copy is lost
    queue_delay_s: float  # T: mean queueing delay of turns whose KV had been evicted
    eta: float  # -Corr(turns done, turns left), in [-1, 1]
    is_memory_short: bool  # a waiting turn was refused its blocks, or a new program waits to start
    total_blocks: int  # GPU KV blocks in all
    free_blocks: int  # neither running nor pinned
    pinned_blocks: int
    away_s: float = 0.0  # for how long the program has been in its tool call
    is_overdue: bool = False  # it is not expected back any more


class Places(NamedTuple):
    """The programs with a place, and who waits, when a turn ends in a tool call."""

    config: ContinuumConfig
    started: int  # programs with a place
    has_tier: bool  # a cheap one that holds more than the GPU
    waiting: int  # turns, in the line or in the queue
    longest_wait_s: float  # of these, so far
    late_share: float  # of the latest turns: their first token came after `first_token_limit_s`
    turn_s: float  # between the ends of the latest turns
    gap_s: float  # mean over the latest turns: their tools'
    refill_s: float  # and the time in which contexts like theirs fill the GPU's cache again
    last: Place  # the latest answer


class FirstInLine(NamedTuple):
    """The program that would start next."""

    need_tokens: float  # what it would add to the started ones, by the forecast of its context
    waited_s: float
    is_promised: bool  # it has waited for as long as was shown when it came
    unnamed_tokens: int  # of running requests without a name that came before it


class Room(NamedTuple):
    """What the started programs need, and how busy the engine is."""

    config: ContinuumConfig
    fits_tokens: float  # forecasts that may be active together, so that the contexts fit the GPU
    tier_tokens: int
    active_tokens: float  # forecasts of the programs with a turn here
    started_tokens: float  # and of those in a tool call
    head_tokens: int  # of the heads that they share
    is_idle: bool  # the GPU has no other work
    prompt_share: float  # of the latest steps' time, 0 to 1; 1 while a turn is in the queue
    last: Place  # the latest answer about a place

    def free_tokens(self, unnamed_tokens: int) -> float:
        """The largest forecast that fits beside all that have started; below 0 where they are too many."""
        of_started = max(self.fits_tokens, self.tier_tokens) - self.started_tokens
        return min(of_started, self.fits_tokens - self.active_tokens) - self.head_tokens - unnamed_tokens


class Line(NamedTuple):
    """Who stands in the line, for the bound of waits."""

    config: ContinuumConfig
    started: int  # programs with a place
    tenants: int  # that have a place or wait for one
    most_of_one: int  # programs that one tenant has in the line
    has_tier: bool  # a cheap one that holds more than the GPU
    longest_reload_s: float  # of programs with a place
    call_s: float  # between the latest turns that ended in calls


class StepState(NamedTuple):
    """The requests before a step."""

    most_tokens: int  # vLLM's own budget
    running: int
    decoding: int  # of these
    waiting: int
    waiting_singles: int  # of these, requests that are no program's turn
    each: int  # tokens of a decode: one, and its drafts
    prompt_share: float  # of the latest steps' time, 0 to 1
    is_memory_short: bool
    times: StepTimes  # of earlier steps; read only


class Chunk(NamedTuple):
    """A step's budget."""

    tokens: int
    reason: str


class End(NamedTuple):
    """A turn has ended that may be its program's last."""

    is_told: bool  # by its client
    claims: int  # ends that the tenant's clients have told,
    wrong_claims: int  # and those after which the program came back
    lost_share: float  # of the gaps of its tool, if the client has told no end
    has_returned: bool = False  # its program, from an earlier call of the tool


class Eviction(NamedTuple):
    """Whether a turn's own KV is the next to be evicted."""

    is_first: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Policy:
    """The functions that the scheduler calls. `dataclasses.replace` changes single ones."""

    retain: Callable[[FinishedTurn, EngineState], Retention]
    order: Callable[[QueueEntry], Order]
    may_start: Callable[[FirstInLine, Room], Start] | None = None
    gives_up_place: Callable[[FinishedTurn, EngineState, Places], Place] | None = None
    chunk: Callable[[StepState], Chunk] | None = None
    to_load: ToLoad | None = None
    evicts_first: Callable[[End], Eviction] | None = None
    longest_wait_s: Callable[[Line], float] | None = None  # in the line, by may_start and gives_up_place

    @property
    def admits(self) -> bool:
        """Whether programs wait in a line until they may start."""
        return self.may_start is not None
