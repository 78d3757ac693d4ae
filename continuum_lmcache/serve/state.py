"""The fleet's state in a deployment actor: one for all proxies and replicas, kept alive by Ray's controller.

It decides nothing: continuum_lmcache.fleet does. It has the clock and the callers. If the actor is lost, Ray
starts another without any programs; each replica's next report has all that it knows.

Callers: a router calls `place_turn`, a replica `take_report`; users call `snapshot`.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

from continuum_lmcache.fleet.fleet import REPORT_AGE_S, Fleet, KnownProgram, ReplicaReport, Route
from continuum_lmcache.serve.names import TurnHeader
from continuum_lmcache.types import ProgramId

START_WAIT_S = 5.0  # at most, for the replicas' first reports: ten of their periods
POLL_S = 0.02  # between two looks whether all replicas have reported


class FleetState:
    """The actor's class. Its methods run in one event loop; times are this process's.

    `mover`, `cooldown_s`: Fleet's; `key`: hexadecimal. Plain values: Ray converts others when it sends them.
    """

    def __init__(
        self, mover: str, cooldown_s: float, key: str, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.now_s = now_s
        self.name = secrets.token_hex(8)  # another one after each restart
        self.fleet = Fleet(bytes.fromhex(key), mover, cooldown_s)
        self._start_until_s = self.now_s() + START_WAIT_S
        self._restored: set[str] = set()  # replicas that have reported all their programs to this state

    async def place_turn(
        self, name: TurnHeader, visible: Collection[str], home: str | None = None
    ) -> Route | None:
        """Where the turn goes; None: no replica has reported. `visible`: the replicas that the router sees;
        `home`: the one of these that it sent the program's earlier turns to."""
        while self.now_s() < self._start_until_s and not self._restored.issuperset(visible):
            await asyncio.sleep(POLL_S)  # a new state would take a started program for a new one
        program = ProgramId(name.program) if name.program else None
        return self.fleet.on_arrival(self.now_s(), program, visible, home, may_move=not name.stays)

    async def take_report(
        self,
        report: ReplicaReport,
        programs: Iterable[KnownProgram],
        is_complete: bool,
    ) -> str:
        """A replica's report, with its programs that have changed, or with all of them. The answer is this
        state's name: to a new name the replica must report all."""
        now_s = self.now_s()
        self.fleet.on_report(now_s, replace(report, at_s=now_s), programs)
        if is_complete:
            self._restored.add(report.replica)
        return self.name

    async def snapshot(self) -> dict[str, Any]:
        """The state for GET /fleet, in JSON's types. It has no program's name."""
        now_s, fleet = self.now_s(), self.fleet
        replicas = [
            {
                "replica": name,
                **state.report.about,
                "report_age_seconds": round(now_s - state.report.at_s, 3),
                "programs": fleet.homes[name],
                "requests": state.requests,
                "wait_seconds": round(state.wait_s, 3),
            }
            for name, state in fleet.replicas.items()
        ]
        return {
            "schema": 2,
            "state": self.name,
            "replicas": sorted(replicas, key=lambda row: row.get("rank", math.inf)),
            "turns": {why.value: n for why, n in fleet.routes.items()},
            "config": {"mover": fleet.mover, "cooldown_s": fleet.cooldown_s, "report_age_s": REPORT_AGE_S},
        }
