"""The routers by name (ROUTERS): each decides where a turn goes, in minimal code.

All but ours see exact present figures; a real router's are late and partly estimated.

    hash            rendezvous hash of the program, like consistent hashing of a session
    sticky          a program's first turn to the fewest requests, later ones where the first went
    affinity        first turn to the fewest pending prefill tokens, later ones there: EAR without migration
    moves           no home: each turn to the fewest pending prefill tokens: migration without affinity
    ear             the Elastic Affinity Router: affinity, and it migrates
    ours            the product's (continuum_lmcache/fleet/); replicas report waits where the engine is stock
    ours-moves      the same, and all replicas report waits; ours-no-moves: none does
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from continuum_lmcache.fleet.fleet import Fleet, ReplicaId, ReplicaReport
from continuum_lmcache.serve.replica_programs import ReplicaPrograms
from continuum_lmcache.types import ProgramId
from experiments.fleet.replica import Replica, Turn

REPORT_S = 0.5  # how often replicas report to ours, as on Ray Serve
COOL_S = 30.0  # T_cool, and ours


class Router:
    """Decides; the run (run.py) carries out."""

    def place(self, _now_s: float, _turn: Turn, _replicas: Sequence[Replica]) -> int:
        """The replica for an arrived turn."""
        raise NotImplementedError

    def first_token(self, _turn: Turn, _replica: int) -> None:
        """A turn's prompt is computed."""

    def ended(self, _now_s: float, _turn: Turn, _replica: Replica) -> None:
        """A turn has been answered."""


Score = Callable[[Turn, Replica], tuple[float, ...]]  # the least wins, then the first


def fewest_requests(_turn: Turn, replica: Replica) -> tuple[float, ...]:
    return (replica.requests,)


def fewest_pending(_turn: Turn, replica: Replica) -> tuple[float, ...]:
    return (replica.pending_tokens, replica.requests)


def by_hash(turn: Turn, replica: Replica) -> tuple[float, ...]:
    digest = blake2b(turn.program.encode(), digest_size=6, salt=replica.index.to_bytes(8, "little")).digest()
    return (float(int.from_bytes(digest, "little")),)


@dataclass(slots=True)
class Each(Router):
    """Each turn goes to the best score."""

    score: Score

    def place(self, _now_s: float, turn: Turn, replicas: Sequence[Replica]) -> int:
        return min(replicas, key=lambda replica: self.score(turn, replica)).index


@dataclass(slots=True)
class Sticky(Router):
    """A program's first turn goes to the best score, later ones to its home."""

    score: Score
    homes: dict[str, int] = field(default_factory=dict)

    def place(self, now_s: float, turn: Turn, replicas: Sequence[Replica]) -> int:
        home = next((r for r in replicas if r.index == self.homes.get(turn.program)), None)
        if home is None:
            home = min(replicas, key=lambda replica: self.score(turn, replica))
        self.homes[turn.program] = self.leaves(now_s, turn, home, replicas).index
        return self.homes[turn.program]

    def leaves(self, _now_s: float, _turn: Turn, home: Replica, _replicas: Sequence[Replica]) -> Replica:
        """The replica that the turn moves to; `home`: it stays."""
        return home


@dataclass(slots=True)
class Ear(Sticky):
    """The Elastic Affinity Router, as its source has it.

    A turn leaves a home with more than `hot_tokens` of pending prefill, unless its program moved within
    `cool_s`, for the replica with the fewest pending tokens, fewer than the home's, whose free KV holds the
    context.
    """

    hot_tokens: float = 20_000.0
    cool_s: float = COOL_S
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


class Ours(Router):
    """The product's fleet, with the product's reports, of each REPORT_S.

    `waits`: whether replicas report what a turn waits there, so that programs move; None: stock engines do.
    """

    def __init__(self, waits: bool | None = None) -> None:
        self.fleet, self._waits = Fleet(), waits
        self.gone: Collection[str] = ()  # replicas that drain
        self._programs: dict[int, ReplicaPrograms] = {}
        self._sent: dict[str, tuple[int, float]] = {}  # turns without a token: where, when
        self._reported_s = -REPORT_S

    def place(self, now_s: float, turn: Turn, replicas: Sequence[Replica]) -> int:
        if now_s - self._reported_s >= REPORT_S:
            self._reported_s = now_s
            for replica in replicas:
                self._report(now_s, replica)
        program = ProgramId(turn.program)
        route = self.fleet.on_arrival(now_s, program, self.gone)
        assert route is not None, "replicas have reported"
        at = int(route.replica)
        self._programs[at].on_start(now_s, [program], route.program_turns, route.program_age_s)
        self._sent[turn.id] = at, now_s
        return at

    def first_token(self, turn: Turn, _replica: int) -> None:
        self._sent.pop(turn.id, None)

    def ended(self, _now_s: float, turn: Turn, replica: Replica) -> None:
        self._programs[replica.index].on_stop([ProgramId(turn.program)], True, turn.is_last)

    def _report(self, now_s: float, replica: Replica) -> None:
        """From the figures that a replica has on Ray Serve. A slow replica does not report its speed."""
        programs = self._programs.setdefault(replica.index, ReplicaPrograms())
        waits = not hasattr(replica.scheduler, "_engine") if self._waits is None else self._waits
        sent_s = [sent_s for at, sent_s in self._sent.values() if at == replica.index]
        wait_s = now_s - min(sent_s, default=now_s) if waits else None
        report = ReplicaReport(ReplicaId(str(replica.index)), replica.counted, wait_s)
        self.fleet.on_report(now_s, report, programs.report(now_s))


ROUTERS: dict[str, Callable[[], Router]] = {
    "hash": lambda: Each(by_hash),
    "sticky": lambda: Sticky(fewest_requests),
    "affinity": lambda: Sticky(fewest_pending),
    "moves": lambda: Each(fewest_pending),
    "ear": lambda: Ear(fewest_pending),
    "ours": Ours,
    "ours-moves": lambda: Ours(waits=True),
    "ours-no-moves": lambda: Ours(waits=False),
}
