"""The fleet's state in a deployment actor: one for all proxies and replicas, kept alive by Ray's controller.

It decides nothing: continuum_lmcache.fleet does. It has the clock and the callers. If the actor is lost, Ray
starts another without any programs; each replica's next report has all that it knows.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

from continuum_lmcache.fleet.fleet import Fleet, KnownProgram, ReplicaReport, Route
from continuum_lmcache.types import ProgramId

START_WAIT_S = 5.0  # at most, for the replicas' first reports: ten of their periods
POLL_S = 0.02  # between two looks whether all replicas have reported


class FleetState:
    """The actor's class. Its methods run in one event loop; times are this process's."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self.now_s = now_s
        self.name = secrets.token_hex(8)  # another one after each restart
        self.fleet = Fleet()
        self._start_until_s = self.now_s() + START_WAIT_S
        self._restored: set[str] = set()  # replicas that have reported all their programs to this state

    async def place_turn(
        self, program: str, may_move: bool, replicas: int, gone: Collection[str] = ()
    ) -> Route | None:
        """For a router: where the turn goes; None: no replica has reported. `program`: "" for none.
        `replicas`: how many it sees; `gone`: those that this has named for the turn, and it does not see."""
        while self.now_s() < self._start_until_s and len(self._restored) < replicas:
            await asyncio.sleep(POLL_S)  # a new state would take a started program for a new one
        return self.fleet.on_arrival(self.now_s(), ProgramId(program) or None, gone, may_move)

    async def take_report(
        self, report: ReplicaReport, programs: Iterable[KnownProgram], state: str = ""
    ) -> str:
        """A replica's report, with its programs that have changed since its last one, or all of them.
        `state`: the one that has heard of all, "" for none. The answer is the same now; "": report all."""
        self.fleet.on_report(self.now_s(), report, programs)
        if not state:
            self._restored.add(report.replica)
        return self.name if state in ("", self.name) else ""

    async def snapshot(self) -> dict[str, Any]:
        """The state for GET /fleet, in JSON's types. It has no program's name."""
        now_s, fleet = self.now_s(), self.fleet
        replicas = [
            {
                "replica": name,
                **state.report.about,
                "report_age_seconds": round(now_s - state.heard_s, 3),
                "programs": fleet.homes[name],
                "requests": state.requests,
                "wait_seconds": state.report.wait_s,
            }
            for name, state in fleet.replicas.items()
        ]
        return {
            "schema": 3,
            "state": self.name,
            "replicas": sorted(replicas, key=lambda row: row.get("rank", math.inf)),
            "turns": {why.value: n for why, n in fleet.routes.items()},
        }
