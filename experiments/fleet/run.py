"""One run of a fleet: turns arrive, a router places them, engines answer.

Engines, clients and the clock are the simulator's (experiments/sim/engine.py). The run carries out what
the router decides, moves KV between replicas where there is a link, and counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vllm.v1.request import Request

from connectors.tier_model import BandwidthLink
from continuum_lmcache.errors import InvariantError
from experiments.fleet.replica import Replica, Sent, Turn, chunk_names
from experiments.fleet.routers import COOL_S, Router
from experiments.sim.agents import Agents
from experiments.sim.clock import VirtualClock
from experiments.sim.engine import Simulation, schedulers
from experiments.sim.result import Result, percentile
from experiments.sim.serving import STOCK, Setup
from experiments.workload import Program

SETTLED_TURNS = 5  # a move was right if its program does not move again within this many turns


@dataclass(frozen=True, slots=True)
class FleetSetup:
    """Equal replicas, except for their speed."""

    engine: Setup
    speeds: tuple[float, ...]  # of each GPU, relative to the setup's machine
    link_gbps: float = 0.0  # between replicas, by its reader, from GPU or DRAM into DRAM; 0: none


@dataclass(frozen=True, slots=True)
class Moved:
    """A turn that went to another replica than its program's last one."""

    at_s: float
    program: str
    number: int  # of the turn


@dataclass(slots=True)
class FleetResult:
    """The results of a run, besides its turns and jobs."""

    result: Result
    replica_of: dict[tuple[str, int], int] = field(default_factory=dict)  # by program and turn
    moves: list[Moved] = field(default_factory=list)
    copies_s: list[float] = field(default_factory=list)  # of KV over the link, waiting for it included

    def ttft_p90_s(self) -> list[float]:
        """The P90 of first tokens of each replica that answered a turn, seconds."""
        by: dict[int, list[float]] = {}
        for turn in self.result.turns:
            by.setdefault(self.replica_of[turn.program_id, turn.number], []).append(turn.ttft_s)
        return [percentile(values, 90) for values in by.values()]

    def accurate_share(self) -> float:
        """Of the moves, those whose program did not move again within SETTLED_TURNS; 1.0 for none."""
        again = sum(
            any(m.program == move.program and 0 < m.number - move.number <= SETTLED_TURNS for m in self.moves)
            for move in self.moves
        )
        return 1.0 - again / len(self.moves) if self.moves else 1.0

    def thrash(self) -> int:
        """Moves within COOL_S of the same program's last one."""
        last_s: dict[str, float] = {}
        count = 0
        for move in self.moves:
            count += move.at_s - last_s.get(move.program, -math.inf) < COOL_S
            last_s[move.program] = move.at_s
        return count


def run_fleet(programs: Sequence[Program], setup: FleetSetup, router: Router) -> FleetResult:
    """Run the programs. The same input gives an equal result.

    Raises TraceError for programs that cannot be run, InvariantError if a turn is not answered exactly once,
    or a block or a pin is left.
    """
    with schedulers(setup.engine, programs, len(setup.speeds)) as (made, clock):
        return FleetRun(programs, setup, made, clock, router).finish()


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
        super().__init__(partial(Agents, programs), setup.engine, schedulers, clock, setup.speeds)
        self.fleet, self.router = setup, router
        self.replicas = [Replica(at, engine) for at, engine in enumerate(self.engines)]
        self.links = [BandwidthLink(setup.link_gbps) for _ in self.replicas]
        self.last: dict[str, int] = {}  # replica of a program's latest turn
        self.found = FleetResult(Result((), (), 0, 0, 0.0, 0, {}, False))

    def finish(self) -> FleetResult:
        self.found.result = self.run()
        turns = [(turn.program_id, turn.number) for turn in self.found.result.turns]
        expected = sum(len(program.turns) for program in self.agents.programs)
        if not len(turns) == len(set(turns)) == expected or any(r.sent for r in self.replicas):
            raise InvariantError(f"at the end of the run turns answered({len(turns)}) != sent({expected})")
        return self.found

    def send(self, request: Request) -> None:
        live, now_s = self.agents.asked[request.request_id], self.clock.now_s
        program = live.program
        is_last = live.spec is program.turns[-1]
        turn = Turn(request, program.program_id, live.turn + 1, is_last, program.arrival_s)
        replica = self.replicas[self.router.place(now_s, turn, self.replicas)]
        if self.last.setdefault(turn.program, replica.index) != replica.index:
            self.found.moves.append(Moved(now_s, turn.program, turn.number))
        self.last[turn.program] = replica.index
        if self.setup.policy != STOCK and turn.number > 1:
            assert request.sampling_params is not None and request.sampling_params.extra_args
            age_s = round(now_s - turn.program_arrival_s)
            request.sampling_params.extra_args |= {"program_turns": turn.number - 1, "program_age_s": age_s}
        replica.sent[turn.id] = Sent(turn, replica.hit_tokens(turn))
        ready_s = self._copies(turn, replica)
        if ready_s is None:
            replica.engine.add(request)
        else:
            self.timetable.at(ready_s, partial(self._arrives, turn, replica))

    def hear(self, replica: int, said: Any) -> None:
        live, there = self.agents.asked[said.request_id], self.replicas[replica]
        if live.first_token_s is None:
            self.router.first_token(there.sent[said.request_id].turn, replica)
        self.agents.hear(said)
        if said.finish_reason is None:
            return
        turn = there.sent.pop(said.request_id).turn
        self.found.replica_of[turn.program, turn.number] = replica
        self.router.ended(self.clock.now_s, turn, there)

    # KV between replicas ---------------------------------------------------

    def _copies(self, turn: Turn, replica: Replica) -> float | None:
        """Copy what another replica has of the prompt and this one lacks. When it ends; None: no copy.

        The bytes pass the reader's link one after the other; a lookup takes no time.
        """
        if not self.fleet.link_gbps or replica.store is None or turn.number == 1:
            return None
        has_tokens = replica.hit_tokens(turn)
        found_tokens = max((r.hit_tokens(turn) for r in self.replicas if r is not replica), default=0)
        if found_tokens <= has_tokens:
            return None
        spec = replica.store.spec
        chunks = found_tokens // spec.chunk_tokens - has_tokens // spec.chunk_tokens
        now_s = self.clock.now_s
        ready_s = self.links[replica.index].reserve(now_s, chunks * replica.store.chunk_bytes)
        self.found.copies_s.append(ready_s - now_s)
        replica.sent[turn.id].hit_tokens = found_tokens
        return ready_s

    def _arrives(self, turn: Turn, replica: Replica) -> None:
        """The copy has ended: its chunks are in this replica's DRAM, and the turn queues."""
        store = replica.store
        assert store is not None
        names = chunk_names(turn, store)[: replica.sent[turn.id].hit_tokens // store.spec.chunk_tokens]
        keep = set(names)
        for name in names:
            if name not in store.dram.names and store.dram.make_room(keep) is not None:
                store.dram.names[name] = None
        replica.engine.add(turn.request)
