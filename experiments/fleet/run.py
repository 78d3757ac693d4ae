"""One run of a fleet: turns arrive, a router places them, engines answer, replicas die.

Engines, clients and the clock are the simulator's (experiments/sim/engine.py). The run carries out what
the router decides, moves KV between replicas where there is a link, and counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vllm.v1.request import Request

from connectors.tier_model.bandwidth_link import BandwidthLink
from connectors.tier_model.lru_tier import LruTier
from continuum_lmcache.errors import InvariantError
from experiments.fleet.replica import Replica, Sent, Turn, chunk_names
from experiments.fleet.routers import Router
from experiments.sim.agents import Agents
from experiments.sim.clock import VirtualClock, virtual_time
from experiments.sim.engine import Simulation, longest_of
from experiments.sim.result import Result
from experiments.sim.serving import STOCK, Setup, build_scheduler
from experiments.workload import Program

TICK_S = 0.5  # reports, the line at the router, the timeline
RETRY_S = 1.0  # until a client repeats the turns of a dead replica
ENDLESS_S = 1e6


@dataclass(frozen=True, slots=True)
class FleetSetup:
    """Equal replicas, except for their speed."""

    engine: Setup
    speeds: tuple[float, ...]  # of each GPU, relative to the setup's machine
    pool: bool = False  # one DRAM for all; else each has its own
    link_gbps: float = 0.0  # between replicas, by its reader, from GPU or DRAM into DRAM; 0: none
    starts_known: bool = True  # engines know which programs have started elsewhere
    dies_at_s: float | None = None  # the first replica


@dataclass(frozen=True, slots=True)
class Move:
    """A turn that went to another replica than its program's last one."""

    at_s: float
    program: str
    number: int  # of the turn
    source: int
    target: int
    is_forced: bool  # the source is dead


@dataclass(slots=True)
class FleetResult:
    """The results of a run, besides its turns and jobs."""

    result: Result
    replica_of: dict[tuple[str, int], int] = field(default_factory=dict)  # by program and turn
    moves: list[Move] = field(default_factory=list)
    waits_s: dict[str, float] = field(default_factory=dict)  # at the router, of turns that waited there
    copies_s: list[float] = field(default_factory=list)  # of KV over the link, waiting for it included
    lost_turns: int = 0  # in flight at a replica that died; each was sent again
    rehomed_s: float = 0.0  # from then until the last of them was at another replica
    timeline: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)  # pending tokens by replica


def run_fleet(programs: Sequence[Program], setup: FleetSetup, router: Router) -> FleetResult:
    """Run the programs. The same input gives an equal result.

    Raises TraceError for programs that cannot be run, InvariantError if a turn is not answered exactly once,
    a block or a pin is left, or the run gets stuck.
    """
    longest = longest_of(programs, setup.engine)
    clock = VirtualClock()
    with ExitStack() as until, virtual_time(clock):
        schedulers = []
        for _ in setup.speeds:
            schedulers.append(build_scheduler(setup.engine, clock, longest + 1, until))
            until.callback(schedulers[-1].shutdown)
        run = FleetRun(programs, setup, schedulers, clock, router)
        return run.finish()


class FleetRun(Simulation):
    """`finish` may be called once."""

    def __init__(
        self,
        programs: Sequence[Program],
        setup: FleetSetup,
        schedulers: Sequence[Any],
        clock: VirtualClock,
        router: Router,
    ) -> None:
        self.held: dict[str, tuple[float, Turn]] = {}  # at the router, since when
        super().__init__(partial(Agents, programs), setup.engine, schedulers, clock, setup.speeds)
        self.fleet, self.router = setup, router
        self.replicas = [Replica(at, engine) for at, engine in enumerate(self.engines)]
        self.links = [BandwidthLink(setup.link_gbps) for _ in self.replicas]
        self.last: dict[str, int] = {}  # replica of a program's latest turn
        self.lost: set[str] = set()  # turns to be placed again since a replica died
        self.died_s = 0.0
        self.found = FleetResult(Result((), (), 0, 0, 0.0, 0, {}, False))
        if setup.pool:
            self._share_dram()
        if setup.dies_at_s is not None:
            self.timetable.at(setup.dies_at_s, self._dies)
        self.timetable.at(TICK_S, self._tick)

    def finish(self) -> FleetResult:
        self.found.result = self.run()
        turns = [(turn.program_id, turn.number) for turn in self.found.result.turns]
        expected = sum(len(program.turns) for program in self.agents.programs)
        for holds, equation in (
            (len(turns) == len(set(turns)) == expected, f"turns answered({len(turns)}) != sent({expected})"),
            (not self.held, f"turns at the router({len(self.held)}) != 0"),
            (not any(r.sent for r in self.replicas), "turns at a replica that nobody answered != 0"),
        ):
            if not holds:
                raise InvariantError(f"at the end of the run {equation}")
        return self.found

    @property
    def alive(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.alive]

    # a turn's life ---------------------------------------------------------

    def send(self, request: Request) -> None:
        live = self.agents.asked[request.request_id]
        program = live.program
        turn = Turn(
            request=request,
            program=program.program_id,
            number=live.turn + 1,
            is_last=live.spec is program.turns[-1],
            arrival_s=live.arrival_s,
            program_arrival_s=program.arrival_s,
        )
        target = self.router.place(self.clock.now_s, turn, self.alive)
        if target is None:
            self.held[turn.id] = (self.clock.now_s, turn)
            self._open()
        else:
            self._dispatch(turn, target)

    def hear(self, replica: int, said: Any) -> None:
        live, turns = self.agents.asked[said.request_id], self.replicas[replica].sent
        if live.first_token_s is None:
            self.router.first_token(self.clock.now_s, turns[said.request_id].turn)
        self.agents.hear(said)
        if said.finish_reason is None:
            return
        sent = turns.pop(said.request_id)
        self.found.replica_of[sent.turn.program, sent.turn.number] = replica
        context_tokens = sent.turn.prompt_tokens + self.agents.turns[-1].output_tokens
        self.router.ended(self.clock.now_s, sent.turn, replica, context_tokens)
        self._open()

    def _open(self) -> None:
        """Send the turns that waited at the router and may start now."""
        for opening in self.router.opens(self.clock.now_s, self.alive):
            since_s, turn = self.held.pop(opening.turn.id)
            self.found.waits_s[turn.id] = self.clock.now_s - since_s
            self._dispatch(turn, opening.replica)

    def _dispatch(self, turn: Turn, index: int) -> None:
        now_s, replica, before = self.clock.now_s, self.replicas[index], self.last.get(turn.program)
        if not replica.alive:
            raise InvariantError(f"{turn.id} was sent to replica {index}, which is dead")
        if before is not None and before != index:
            is_forced = not self.replicas[before].alive
            self.found.moves.append(Move(now_s, turn.program, turn.number, before, index, is_forced))
        self.last[turn.program] = index
        if turn.id in self.lost:
            self.lost.discard(turn.id)
            self.found.rehomed_s = max(self.found.rehomed_s, now_s - self.died_s)
        if self.fleet.starts_known and self.setup.policy != STOCK and turn.number > 1:
            assert turn.request.sampling_params is not None and turn.request.sampling_params.extra_args
            age_s = now_s - turn.program_arrival_s
            turn.request.sampling_params.extra_args |= {
                "program_turns": turn.number - 1,
                "program_age_s": round(age_s),
            }
        replica.sent[turn.id] = Sent(turn, replica.hit_tokens(turn))
        ready_s = self._copies(turn, replica)
        if ready_s is None:
            replica.engine.add(turn.request)
        else:
            self.timetable.at(ready_s, partial(self._arrives, turn, replica))

    # KV between replicas ---------------------------------------------------

    def _share_dram(self) -> None:
        """All stores share one DRAM tier; each GPU has its own link to it."""
        stores = [replica.store for replica in self.replicas]
        capacity = sum(store.dram.capacity for store in stores if store is not None)
        tier = LruTier(capacity)
        for store in stores:
            assert store is not None, "a pool needs DRAM"
            store.dram = tier

    def _copies(self, turn: Turn, replica: Replica) -> float | None:
        """Copy what another replica has of the prompt and this one lacks. When it ends; None: no copy.

        The bytes pass the reader's link one after the other; a lookup takes no time.
        """
        if not self.fleet.link_gbps or replica.store is None or turn.number == 1:
            return None
        has_tokens = replica.hit_tokens(turn)
        found_tokens = max((r.hit_tokens(turn) for r in self.alive if r is not replica), default=0)
        if found_tokens <= has_tokens:
            return None
        spec = replica.store.spec
        chunks = found_tokens // spec.chunk_tokens - has_tokens // spec.chunk_tokens
        now_s = self.clock.now_s
        ready_s = self.links[replica.index].reserve(now_s, chunks * spec.chunk_bytes)
        self.found.copies_s.append(ready_s - now_s)
        replica.sent[turn.id].hit_tokens = found_tokens
        return ready_s

    def _arrives(self, turn: Turn, replica: Replica) -> None:
        """The copy has ended: its chunks are in this replica's DRAM, and the turn queues."""
        if turn.id not in replica.sent:  # the replica died meanwhile
            return
        store = replica.store
        assert store is not None
        names = chunk_names(turn, store)[: replica.sent[turn.id].hit_tokens // store.spec.chunk_tokens]
        keep = set(names)
        for name in names:
            if name not in store.dram.names and store.dram.make_room(keep) is not None:
                store.dram.admit(name)
        replica.engine.add(turn.request)

    # time and death --------------------------------------------------------

    def _tick(self) -> None:
        now_s = self.clock.now_s
        if now_s > ENDLESS_S:
            raise InvariantError(
                f"stuck: {len(self.held)} turns at the router, {len(self.agents.asked)} in all"
            )
        self.found.timeline.append((now_s, tuple(r.pending_tokens for r in self.replicas)))
        self._open()
        self.timetable.at(now_s + TICK_S, self._tick)

    def _dies(self) -> None:
        """The first replica dies with its KV; clients send unanswered turns again."""
        replica, self.died_s = self.replicas[0], self.clock.now_s
        replica.alive = False
        self.engines.remove(replica.engine)
        lost = list(replica.sent)
        replica.sent.clear()
        self.lost, self.found.lost_turns = set(lost), len(lost)
        self.router.died(self.clock.now_s, replica.index)
        for name in lost:
            self.timetable.at(self.clock.now_s + RETRY_S, partial(self.agents.again, name))
        self._open()
