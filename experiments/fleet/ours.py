"""The product's fleet (continuum_lmcache/fleet/) as a router of the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from continuum_lmcache.errors import InvariantError
from continuum_lmcache.fleet.fleet import Fleet, Held, Route
from continuum_lmcache.fleet.report import ReplicaId, ReplicaReport
from continuum_lmcache.types import ProgramId, TurnId
from experiments.fleet.replica import Replica, Turn
from experiments.fleet.routers import Opening


@dataclass(slots=True)
class Ours:
    """`report_s`: how often replicas report; `fleet` is asked on every event."""

    fleet: Fleet
    report_s: float = 0.5
    reported_s: float = -1.0
    held: dict[TurnId, Turn] = field(default_factory=dict)

    def place(self, now_s: float, turn: Turn, replicas: Sequence[Replica]) -> int | None:
        self._hears(now_s, replicas)
        said = self.fleet.on_arrival(now_s, TurnId(turn.id), ProgramId(turn.program), turn.prompt_tokens)
        if isinstance(said, Route):
            return int(said.replica)
        if not isinstance(said, Held):
            raise InvariantError(f"the fleet refused {turn.id} at {now_s:.1f} s: the line is full")
        self.held[said.turn] = turn
        return None

    def opens(self, now_s: float, replicas: Sequence[Replica]) -> list[Opening]:
        self._hears(now_s, replicas)
        return [Opening(self.held.pop(route.turn), int(route.replica)) for route in self.fleet.admit(now_s)]

    def first_token(self, _now_s: float, turn: Turn) -> None:
        self.fleet.on_first_token(TurnId(turn.id))

    def ended(self, now_s: float, turn: Turn, _replica: int, context_tokens: int) -> None:
        if turn.is_last:
            self.fleet.on_last_turn_end(now_s, TurnId(turn.id))
        else:
            self.fleet.on_pause(now_s, TurnId(turn.id), context_tokens)

    def died(self, now_s: float, replica: int) -> None:
        self.fleet.on_replica_death(now_s, name_of(replica))

    def _hears(self, now_s: float, replicas: Sequence[Replica]) -> None:
        """Replicas report every `report_s`."""
        if self.reported_s >= 0 and now_s - self.reported_s < self.report_s:
            return
        for replica in replicas:
            if self.reported_s < 0:
                self.fleet.on_replica_join(now_s, report(now_s, replica))
            else:
                self.fleet.on_report(now_s, report(now_s, replica))
        self.reported_s = now_s


def name_of(replica: int) -> ReplicaId:
    return ReplicaId(str(replica))


def report(now_s: float, replica: Replica) -> ReplicaReport:
    """The replica's report, from stock vLLM's gauges or ours. A slow replica does not report its speed."""
    requests = replica.running + replica.waiting
    lifecycle = getattr(replica.scheduler, "_lifecycle", None)
    if lifecycle is None:
        store = replica.store
        spec = None if store is None else store.spec
        tokens = 0 if spec is None else int(spec.chunks(spec.dram_bytes)) * spec.chunk_tokens
        return ReplicaReport(
            replica=name_of(replica.index),
            at_s=now_s,
            gpu_tokens=replica.kv_tokens,
            requests=requests,
            tier_tokens=tokens,
            returning_first=False,
            costs=replica.engine.setup.machine.costs,
        )
    admission = lifecycle.admission
    return ReplicaReport(
        replica=name_of(replica.index),
        at_s=now_s,
        gpu_tokens=replica.kv_tokens,
        requests=requests,
        tier_tokens=admission.capacity.tier_tokens,
        headroom_tokens=admission.headroom_tokens,
        pending_programs=len(admission.pending),
        oldest_returning_wait_s=replica.oldest_returning_wait_s(now_s),
        costs=lifecycle.advisor.rates.costs,
    )
