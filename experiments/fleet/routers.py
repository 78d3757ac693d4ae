"""The routers by name (ROUTERS): each decides where a turn goes, in minimal code.

All but `fleet` see exact present figures; a real router's are late and partly estimated. A dead replica
is never offered.

    round-robin     the next one
    least           vLLM 0.32's DPLBAsyncMPClient: the least of in flight or waiting + running, whichever is
                    more; a waiting line counts more on a full GPU; the scan's start rotates
    lmetric         (pending + new tokens) x (requests + 1), of the LMetric paper; hits are exact
    hits-load       Dynamo's KV router: blocks to prefill + active blocks, weight 1, temperature 0; exact hits
    hash            rendezvous hash of the program, like consistent hashing of a session
    sticky          a program's first turn to the fewest requests, later ones where the first went
    ear-affinity    first turn to the fewest pending prefill tokens, later ones there: EAR without migration
    ear             the same, and it migrates: see Ear
    ear-migration   no home: each turn to the fewest pending prefill tokens, and its KV follows over the link
    program-sched   vllm-router's program scheduling (program_scheduling.py)
    fleet           ours (ours.py); -affinity: without moves; -no-line: no wait at the router, and
                    no moves
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from typing import Protocol

from experiments.fleet.replica import Replica, Turn

KV_PENALTY = 6.0  # vLLM's: waiting turns' extra weight, for each full share of the KV cache above one half
BLOCK_TOKENS = 64  # of the simulator; only its ratio to a prompt matters


@dataclass(frozen=True, slots=True)
class Opening:
    """A turn that waited at the router may start."""

    turn: Turn
    replica: int


class Router(Protocol):
    """Decides; the run (run.py) carries out. Every event has its time."""

    def place(self, now_s: float, turn: Turn, replicas: Sequence[Replica]) -> int | None:
        """The replica for an arrived turn; None: it waits here until `opens` returns it."""

    def opens(self, now_s: float, replicas: Sequence[Replica]) -> list[Opening]:
        """The turns that need not wait any longer. Called after each turn's end and each TICK_S."""

    def first_token(self, now_s: float, turn: Turn) -> None:
        """A turn's prompt is computed."""

    def ended(self, now_s: float, turn: Turn, replica: int, context_tokens: int) -> None:
        """A turn has been answered."""

    def died(self, now_s: float, replica: int) -> None:
        """A replica died. Its turns arrive again, through `place`."""


class Stateless:
    """A router that needs no events."""

    def opens(self, _now_s: float, _replicas: Sequence[Replica]) -> list[Opening]:
        return []

    def first_token(self, _now_s: float, _turn: Turn) -> None:
        pass

    def ended(self, _now_s: float, _turn: Turn, _replica: int, _context_tokens: int) -> None:
        pass

    def died(self, _now_s: float, _replica: int) -> None:
        pass


Score = Callable[[Turn, Replica], tuple[float, ...]]  # the least wins, then the first


def fewest_requests(_turn: Turn, replica: Replica) -> tuple[float, ...]:
    return (replica.requests,)


def fewest_pending(_turn: Turn, replica: Replica) -> tuple[float, ...]:
    return (replica.pending_tokens, replica.requests)


def lmetric(turn: Turn, replica: Replica) -> tuple[float, ...]:
    """Without the + 1 the product would be 0 for all idle replicas."""
    new_tokens = turn.prompt_tokens - replica.hit_tokens(turn)
    return ((replica.pending_tokens + new_tokens) * (replica.requests + 1),)


def hits_and_load(turn: Turn, replica: Replica) -> tuple[float, ...]:
    """Overlap weight x potential prefill blocks + potential decode blocks (kv_router/scheduler.rs)."""
    prefill_tokens = replica.pending_tokens + turn.prompt_tokens - replica.hit_tokens(turn)
    return ((prefill_tokens + replica.context_tokens + turn.prompt_tokens) / BLOCK_TOKENS,)


def by_hash(turn: Turn, replica: Replica) -> tuple[float, ...]:
    digest = blake2b(turn.program.encode(), digest_size=6, salt=replica.index.to_bytes(8, "little")).digest()
    return (float(int.from_bytes(digest, "little")),)


@dataclass(slots=True)
class Each(Stateless):
    """Each turn goes to the best score."""

    score: Score

    def place(self, _now_s: float, turn: Turn, replicas: Sequence[Replica]) -> int:
        return min(replicas, key=lambda replica: self.score(turn, replica)).index


@dataclass(slots=True)
class RoundRobin(Stateless):
    turns: count[int] = field(default_factory=count)

    def place(self, _now_s: float, _turn: Turn, replicas: Sequence[Replica]) -> int:
        return replicas[next(self.turns) % len(replicas)].index


@dataclass(slots=True)
class LeastOutstanding(Stateless):
    """With one API server, whose count is exact, and a current snapshot."""

    scans: count[int] = field(default_factory=count)

    def place(self, _now_s: float, _turn: Turn, replicas: Sequence[Replica]) -> int:
        start = next(self.scans) % len(replicas)
        return min([*replicas[start:], *replicas[:start]], key=self.score).index

    @staticmethod
    def score(replica: Replica) -> float:
        waiting, used = replica.waiting, 1.0 - replica.free_tokens / replica.kv_tokens
        score = float(max(replica.requests, waiting + replica.running))
        return score + waiting * KV_PENALTY * max(0.0, used - 0.5)


@dataclass(slots=True)
class Sticky(Stateless):
    """A program's first turn goes to the best score, later ones to its home, unless that is dead."""

    score: Score
    homes: dict[str, int] = field(default_factory=dict)

    def place(self, now_s: float, turn: Turn, replicas: Sequence[Replica]) -> int:
        home = next((r for r in replicas if r.index == self.homes.get(turn.program)), None)
        if home is None:
            home = min(replicas, key=lambda replica: self.score(turn, replica))
        found = self.leaves(now_s, turn, home, replicas)
        self.homes[turn.program] = found.index
        return found.index

    def leaves(self, _now_s: float, _turn: Turn, home: Replica, _replicas: Sequence[Replica]) -> Replica:
        """The replica that the turn moves to; None: it stays."""
        return home


@dataclass(slots=True)
class Ear(Sticky):
    """The Elastic Affinity Router, as its source has it.

    A turn leaves a home with more than `hot_tokens` of pending prefill, unless its program moved within
    `cool_s`, for the replica with the fewest pending tokens, fewer than the home's, whose free KV holds the
    context.
    """

    hot_tokens: float = 20_000.0
    cool_s: float = 30.0
    moved_s: dict[str, float] = field(default_factory=dict)

    def leaves(self, now_s: float, turn: Turn, home: Replica, replicas: Sequence[Replica]) -> Replica:
        pending = home.pending_tokens
        if turn.number == 1 or pending <= self.hot_tokens:
            return home
        if now_s - self.moved_s.get(turn.program, -self.cool_s) < self.cool_s:
            return home
        with_room = [
            r for r in replicas if r.free_tokens >= turn.prompt_tokens and r.pending_tokens < pending
        ]
        if not with_room:
            return home
        self.moved_s[turn.program] = now_s
        return min(with_room, key=lambda replica: fewest_pending(turn, replica))
