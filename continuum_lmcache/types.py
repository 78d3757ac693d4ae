"""The values that pass between the scheduler, the policies and the tiers. All frozen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, NewType

ProgramId = NewType("ProgramId", str)
TurnId = NewType("TurnId", str)  # vLLM's request id

MAX_TURNS = 100_000  # of one program; more is no agent
MOST_TENANTS = 64  # with statistics of their own, those with the most
MOST_PROGRAMS = 100_000  # known at a time: beyond it those that are idle longest are forgotten

ToolKey = tuple[str, ...]
"""What a turn called, most specific first: ("pytest", "bash"). () is unknown."""

NO_CALL: ToolKey = ("no call",)  # the turn is an answer: its program waits for its user, or has ended


class Tier(Enum):
    """Where a prefix is."""

    __hash__ = object.__hash__  # Enum's own is Python code, and tables are indexed by it often

    GPU = "gpu"
    DRAM = "dram"
    SSD = "ssd"
    NONE = "none"


class PinEnd(Enum):
    """How a pin ended. Low cardinality: these are metric labels."""

    __hash__ = object.__hash__

    REUSED = "reused"  # the program came back and took its blocks over
    DIVERGED = "diverged"  # the program came back with another prompt
    EXPIRED = "expired"  # its TTL ended first
    RECLAIMED = "reclaimed"  # another request needed the memory
    SUPERSEDED = "superseded"  # another turn of the same program ended later
    ENDED = "ended"  # the program has ended
    RESET = "reset"  # the cache was reset, or the engine slept or stopped


@dataclass(frozen=True, slots=True)
class Residency:
    """Where the first `total_tokens` of a prompt could come from, as consecutive stretches.

    [0, gpu) is in vLLM's prefix cache, the next `dram_tokens` are in LMCache's DRAM, the next
    `ssd_tokens` on its disk, and the rest must be computed (cost_model.py: PrefillReload).
    """

    gpu_tokens: int
    dram_tokens: int
    ssd_tokens: int
    total_tokens: int

    @property
    def recompute_tokens(self) -> int:
        """Tokens that neither the GPU nor a tier has."""
        return self.total_tokens - self.gpu_tokens - self.dram_tokens - self.ssd_tokens


@dataclass(frozen=True, slots=True)
class FinishedTurn:
    """One finished turn of one program, as the scheduler saw it."""

    program: ProgramId
    number: int  # 1 for the program's first turn
    tool: ToolKey  # what it called
    context_tokens: int  # prompt and output: tokens whose KV is on the GPU now
    blocks: int  # GPU blocks that a pin would hold
    residency: Residency  # where the context would be found without the pin
    tenant: str = ""  # Program.tenant
    repeated_share: float = 1.0  # of its program's kept contexts, by the latest returns
    place_turns: int = 0  # of the program since it got its place, this one included
    place_s: float = 0.0  # since then
    line_reload_s: float = 0.0  # what the context costs after a wait in the line
    has_returned: bool = False  # its program, from an earlier call of the tool


@dataclass(frozen=True, slots=True)
class Retention:
    """For how long a finished turn's KV should stay on the GPU, and why."""

    ttl_s: float  # 0: do not pin
    reason: str  # low cardinality: "cdf", "cold-start", ...
    probability: float = 0.0  # P(tau): chance that the program is back within ttl_s
    benefit_s: float = 0.0  # T * eta + PrefillReload, what a return in time saves
    cost_s: float = 0.0  # the price of holding the memory
    samples: int = 0  # number of durations in the estimate
    level: str = ""  # which distribution was used: "tool", "all", "cold"
    asks_again: bool = False  # the policy is asked anew when the pin expires, and when memory becomes short
    reload_s: float = 0.0  # PrefillReload, if the GPU's copy is lost
    policy: str = ""  # its name; the engine sets it


class Place(NamedTuple):
    """Whether a program keeps its place during a tool call, and why."""

    is_kept: bool
    reason: str  # low cardinality
    expected_s: float  # for so long: then the program is not expected back any more


class Start(NamedTuple):
    """Whether the first program in the line may start, and why."""

    may: bool
    reason: str  # low cardinality
    need_tokens: float = 0.0  # what the program would add to the started ones
    room_tokens: float = 0.0  # what fits beside them


@dataclass(frozen=True, slots=True)
class Pin:
    """Blocks that stay on the GPU for a program that is away."""

    program: ProgramId
    block_ids: Sequence[int]
    taken_s: float
    deadline_s: float
    retention: Retention
    turn: FinishedTurn  # that ended

    @property
    def blocks(self) -> int:
        return len(self.block_ids)


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """The values that the order of the waiting queue may depend on. Times on the engine's clock."""

    preempted: bool
    pinned: bool
    priority: int  # the client's, lower first (vLLM's convention); 0 unless honor_priority
    program_arrival_s: float
    turn_arrival_s: float
    program_order_s: float  # when it came, or last came to wait for a place
    attained_tokens: int  # tokens computed for the program so far
