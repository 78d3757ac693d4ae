"""vllm-router's program scheduling, from its documentation: its defaults, a token capacity, a global queue.

A program is bound to a replica by hash and is active there while a turn of it is in flight, and for a TTL
after. What is active may fill the replica's KV tokens. A turn of a program that is not active waits in the
pool until its replica has room, no request waits in its engine (polled each second), and fewer than 64
programs are active; the most recently active one first. A paused program whose replica lacks memory goes to
another that has its headroom and 1.2 times its context more. After 300 s it is admitted in any case.

The TTL is the one with the greatest gain over the latest 100 tool gaps, P(gap <= t) x the cost of a miss less
the time held, up to 10 s; none before 100 gaps were seen: the documentation says what it is chosen from, the
rule is read from that. Left out: the reserve for growth, batch gain, the yield after 14 rounds, and
capacity repair.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from experiments.fleet.replica import Replica, Turn
from experiments.fleet.routers import Opening, by_hash

POLL_S = 1.0  # metrics_interval_seconds
MOST_PROGRAMS = 64  # max_active_programs_per_target
OUTPUT_TOKENS = 100  # decode_buffer_tokens
HEADROOM = 1.2  # cross_rank_headroom_ratio
FORCED_S = 300.0  # force_resume_timeout_seconds
LONGEST_TTL_S = 10.0  # max_acting_ttl_seconds
WINDOW = 100  # stats_window_size
WAITING = 1  # admission_waiting_request_threshold
DECODE_KEPT = 0.15  # decode_throughput_alpha


@dataclass(slots=True)
class Bound:
    """One program."""

    replica: int
    tokens: int = 0  # its weight while it is active
    live: int = 0  # turns in flight
    until_s: float = 0.0  # active until then without one
    ended_s: float | None = None  # its last turn
    paused: bool = False  # it was active before


@dataclass(slots=True)
class ProgramScheduling:
    """`prefill_s`: the calibrated seconds of a number of tokens."""

    prefill_s: Callable[[int], float]
    programs: dict[str, Bound] = field(default_factory=dict)
    pool: list[tuple[float, Turn]] = field(default_factory=list)  # by when they came
    gaps_s: dict[int, deque[float]] = field(default_factory=dict)  # by replica
    polled: dict[int, int] = field(default_factory=dict)  # waiting requests
    polled_s: float = -POLL_S

    def place(self, now_s: float, turn: Turn, replicas: Sequence[Replica]) -> int | None:
        alive = {replica.index for replica in replicas}
        bound = self.programs.get(turn.program)
        if bound is None or bound.replica not in alive:
            bound = self.programs[turn.program] = Bound(
                min(replicas, key=lambda r: by_hash(turn, r)).index,
            )
        if bound.ended_s is not None:
            self._gaps(bound.replica).append(now_s - bound.ended_s)
        if self._active(now_s, bound):
            return self._starts(turn, bound)
        self.pool.append((now_s, turn))
        return None

    def opens(self, now_s: float, replicas: Sequence[Replica]) -> list[Opening]:
        self._polls(now_s, replicas)
        found: list[Opening] = []
        for came_s, turn in sorted(self.pool, key=self._resume_order(now_s)):
            bound = self.programs[turn.program]
            by_index = {replica.index: replica for replica in replicas}
            if bound.replica not in by_index:
                bound.replica = min(replicas, key=lambda r: by_hash(turn, r)).index
            home = by_index[bound.replica]
            target = home if self._admits(now_s, turn, home) or now_s - came_s >= FORCED_S else None
            target = target or self._elsewhere(now_s, came_s, turn, home, replicas)
            if target is not None:
                bound.replica = target.index
                self.pool.remove((came_s, turn))
                found.append(Opening(turn, self._starts(turn, bound)))
        return found

    def first_token(self, _now_s: float, _turn: Turn) -> None:
        pass

    def ended(self, now_s: float, turn: Turn, _replica: int, context_tokens: int) -> None:
        bound = self.programs[turn.program]
        bound.live = max(0, bound.live - 1)
        if turn.is_last:
            del self.programs[turn.program]
            return
        bound.tokens, bound.ended_s, bound.paused = context_tokens + OUTPUT_TOKENS, now_s, True
        bound.until_s = now_s + self._ttl_s(bound.replica, context_tokens)

    def died(self, _now_s: float, replica: int) -> None:
        for bound in self.programs.values():
            if bound.replica == replica:
                bound.live, bound.until_s = 0, 0.0

    # -----------------------------------------------------------------------

    def _gaps(self, replica: int) -> deque[float]:
        return self.gaps_s.setdefault(replica, deque(maxlen=WINDOW))

    def _active(self, now_s: float, bound: Bound) -> bool:
        return bound.live > 0 or now_s < bound.until_s

    def _starts(self, turn: Turn, bound: Bound) -> int:
        bound.live += 1
        bound.tokens = turn.prompt_tokens + OUTPUT_TOKENS
        return bound.replica

    def _polls(self, now_s: float, replicas: Sequence[Replica]) -> None:
        if now_s - self.polled_s >= POLL_S:
            self.polled_s = now_s
            self.polled = {replica.index: replica.waiting for replica in replicas}

    def _resume_order(self, now_s: float) -> Callable[[tuple[float, Turn]], tuple[float, float]]:
        """Programs that must start first, then the most recently active; new ones by arrival."""

        def order(entry: tuple[float, Turn]) -> tuple[float, float]:
            came_s, turn = entry
            ended_s = self.programs[turn.program].ended_s
            forced = now_s - came_s >= FORCED_S
            return (not forced, came_s if forced or ended_s is None else -ended_s)

        return order

    def _used(self, now_s: float, replica: int) -> tuple[int, int]:
        """Tokens and programs that are active there."""
        found = [b.tokens for b in self.programs.values() if b.replica == replica and self._active(now_s, b)]
        return sum(found), len(found)

    def _admits(self, now_s: float, turn: Turn, replica: Replica) -> bool:
        tokens, programs = self._used(now_s, replica.index)
        fits = tokens + turn.prompt_tokens + OUTPUT_TOKENS <= replica.kv_tokens
        return fits and programs < MOST_PROGRAMS and self.polled.get(replica.index, 0) < WAITING

    def _elsewhere(
        self, now_s: float, came_s: float, turn: Turn, home: Replica, replicas: Sequence[Replica]
    ) -> Replica | None:
        """Another replica for a paused program whose replica lacks memory."""
        bound = self.programs[turn.program]
        mature = len(self._gaps(home.index)) == WINDOW and now_s - came_s >= POLL_S
        waits_there = {self.programs[other.program].replica for _, other in self.pool if other is not turn}
        pressed = self.polled.get(home.index, 0) >= WAITING or home.index in waits_there
        if not (bound.paused and mature and pressed):
            return None

        def headroom(replica: Replica) -> int:
            return max(0, replica.kv_tokens - self._used(now_s, replica.index)[0])

        enough = headroom(home) + HEADROOM * turn.prompt_tokens
        found = [
            replica
            for replica in replicas
            if replica is not home
            and replica.index not in waits_there
            and len(self._gaps(replica.index)) == WINDOW
            and headroom(replica) >= enough
            and self._admits(now_s, turn, replica)
        ]
        return max(found, key=headroom, default=None)

    def _ttl_s(self, replica: int, context_tokens: int) -> float:
        gaps_s = sorted(self._gaps(replica))
        if len(gaps_s) < WINDOW:
            return 0.0
        miss_s = self.prefill_s(context_tokens) * (2.0 - DECODE_KEPT)
        gains = [
            ((at + 1) / WINDOW * miss_s - gap_s, gap_s)
            for at, gap_s in enumerate(gaps_s)
            if gap_s <= LONGEST_TTL_S
        ]
        gain, ttl_s = max(gains, default=(0.0, 0.0))
        return ttl_s if gain > 0 else 0.0
