"""The fleet's state in a deployment actor: one for all proxies and replicas, kept alive by Ray's controller.

It decides nothing: continuum_lmcache.fleet does. It has the clock, the callers and the requests that wait
in the line. If the actor is lost, Ray starts another without any programs; each replica's next report has
those that it knows.

Callers: a router calls `place_turn`, `cancel_turn`, `turn_answered`, `add_replica` and `remove_replica`; a
replica calls `take_report` and `restore_programs`; users call `snapshot` and `metrics`.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from continuum_lmcache.bounded_dict import BoundedDict
from continuum_lmcache.fleet.fleet import Fleet, FleetConfig, Held, KnownProgram, Refused, Route
from continuum_lmcache.fleet.report import ReplicaId, ReplicaReport
from continuum_lmcache.serve.names import TurnName
from continuum_lmcache.serve.replica_programs import FirstToken, TurnEvent
from continuum_lmcache.types import ProgramId, TurnId

FIRST_BYTES_PER_TOKEN = 4.0  # of a request's body, until prompts have been measured
END_GRACE_S = 3.0  # how long a turn's end may be missing after its answer has reached the client
MAX_REMOVED = 1000  # names of removed replicas that are remembered
MAX_LEFT = 1000  # turns whose clients left before they were placed, while a new state waits for reports
MORE_TURNS = (
    500  # that may wait beyond one for each program in a full line; the actor has calls for twice that
)
START_WAIT_S = 5.0  # at most, for the replicas' first reports: ten of their periods
GONE_S = 10.0  # a replica that sent no report for so long, and that the router does not see, is gone
SWEEP_S = 0.5  # between two looks whether there is room for a request that waits
POLL_S = 0.02  # between two looks whether all replicas have reported


class FleetState:
    """The actor's class. Its methods run in one event loop; times are this process's.

    `config`: FleetConfig's fields; `key`: hexadecimal. Plain values: Ray converts others when it sends them.
    """

    def __init__(
        self, config: Mapping[str, Any], key: str, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.now_s = now_s
        self.name = secrets.token_hex(8)  # another one after each restart
        self.fleet = Fleet(FleetConfig.load(config), bytes.fromhex(key))
        self._start_until_s = self.now_s() + START_WAIT_S
        self._restored: set[str] = set()
        self._properties: dict[ReplicaId, Mapping[str, Any]] = {}
        # they may still report while they drain
        self._removed: BoundedDict[ReplicaId, None] = BoundedDict(MAX_REMOVED)
        self._waiting: dict[TurnId, asyncio.Future[Route | Refused]] = {}
        self._answered: dict[TurnId, asyncio.TimerHandle] = {}  # those whose ends may still be reported
        self._left: BoundedDict[TurnId, None] = BoundedDict(MAX_LEFT)
        self._body_bytes, self._tokens = FIRST_BYTES_PER_TOKEN, 1.0
        self._sweeping: asyncio.Task[None] | None = None

    # called by a router ------------------------------------------------------

    async def place_turn(
        self, key: str, name: TurnName, is_retry: bool, visible: Collection[str], home: str | None = None
    ) -> Route | Refused:
        """Where the turn goes. A first turn may wait. `is_retry`: the last answer's replica did not take it.
        `visible`: the replicas that the router sees; `home`: the one of these that it sent the program's
        earlier turns to."""
        turn = TurnId(key)
        if is_retry and (grace := self._answered.pop(turn, None)) is not None:
            grace.cancel()  # what had ended was the attempt that its replica refused
        await self._wait_for_reports(visible)
        now_s = self.now_s()
        self._drop_silent(now_s, visible)
        if turn in self._left:
            del self._left[turn]
            return Refused(turn, 0.0)  # nobody waits for this answer
        live = self.fleet.turns.get(turn)
        if is_retry and live is not None and live.route.replica not in self.fleet.placement.replicas:
            self.fleet.on_abort(now_s, turn)
        program = ProgramId(name.program) if name.program else None
        if program is not None and home is not None and self.fleet.home(program) is None:
            # it counts as one that has finished a turn: such a program never waits as a new one
            self.fleet.restore(now_s, ReplicaId(home), [KnownProgram(program, 1, 0, 0.0)])
        tokens = self.tokens_of(name.body_bytes)
        answer = self.fleet.on_arrival(now_s, turn, program, tokens, claimed_turns=int(home is not None))
        if not isinstance(answer, Held):
            self._answer_sent()  # its program's other turns may have started with it
            return answer
        if len(self._waiting) >= self.fleet.config.max_line + MORE_TURNS and not self.fleet.has_started(turn):
            self.fleet.on_abort(now_s, turn)  # of many turns of few programs; reports need calls, too
            return Refused(turn, self.fleet.placement.retry_after_s(now_s))
        self._keep_sweeping()
        placed: asyncio.Future[Route | Refused] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = placed
        try:
            return await placed
        finally:
            self._waiting.pop(turn, None)

    async def cancel_turn(self, key: str) -> None:
        """The client left, also while its turn waited in the line.

        Ray lets `place_turn` run on when its caller has gone: it would keep one of the actor's calls.
        """
        turn = TurnId(key)
        if turn not in self.fleet.turns and turn not in self.fleet.waiting:
            self._left[turn] = None
        self._abort(turn)
        if (placed := self._waiting.get(turn)) is not None and not placed.done():
            placed.set_result(Refused(turn, 0.0))

    async def turn_answered(self, key: str) -> None:
        """The client has the answer. Its replica reports how it ended, unless the replica died."""
        if (turn := TurnId(key)) in self.fleet.turns:
            grace = asyncio.get_running_loop().call_later(END_GRACE_S, self._abort, turn)
            self._answered[turn] = grace

    async def add_replica(self, replica: str) -> None:
        """The router sees it, perhaps again: Ray hides a replica while it changes its settings."""
        self._removed.pop(ReplicaId(replica), None)

    async def remove_replica(self, replica: str, died: bool) -> None:
        """The router knows that the replica is gone (`died`: with all its turns), or that it drains."""
        name, now_s = ReplicaId(replica), self.now_s()
        self._removed[name] = None
        self._properties.pop(name, None)
        if died:
            self.fleet.on_replica_death(now_s, name)
        else:
            self.fleet.on_replica_drain(name)
        self._admit()

    # called by a replica -----------------------------------------------------

    async def take_report(
        self, replica: str, properties: Mapping[str, Any], report: ReplicaReport, events: Iterable[TurnEvent]
    ) -> str:
        """A replica's report: its events and how full it is. The answer is this state's name: to a new name
        the replica must report all its programs (`restore_programs`)."""
        name, now_s = ReplicaId(replica), self.now_s()
        if name not in self._removed:
            self._properties[name] = properties
            self.fleet.on_replica_join(now_s, replace(report, at_s=now_s))
        for event in events:
            self._apply(now_s, event)
        self._admit()
        return self.name

    async def restore_programs(self, replica: str, held: Iterable[KnownProgram]) -> None:
        """All programs that a replica knows."""
        if ReplicaId(replica) not in self._removed:
            self.fleet.restore(self.now_s(), ReplicaId(replica), held)
            self._restored.add(replica)
            self._answer_sent()

    # called by users ---------------------------------------------------------

    async def snapshot(self) -> dict[str, Any]:
        """The state for GET /fleet, in JSON's types. It has no program's name."""
        now_s, fleet = self.now_s(), self.fleet
        at_home = Counter(program.home for program in fleet.programs.values())
        replicas = [
            {
                "replica": name,
                **self._properties.get(name, {}),
                "report_age_seconds": round(place.age_s(now_s), 3),
                "programs": at_home[name],
                "turns": len(place.turns),
                "requests": place.requests,
                "headroom_tokens": round(place.headroom_tokens()),
                "gpu_tokens": place.report.gpu_tokens,
                "pending_tokens": place.pending_tokens,
            }
            for name, place in fleet.placement.replicas.items()
        ]
        return {
            "schema": 1,
            "state": self.name,
            "replicas": sorted(replicas, key=lambda row: row.get("rank", math.inf)),
            "programs": len(fleet.programs),
            "line": len(fleet.placement.line),
            "line_wait_seconds": round(fleet.line_wait_s(now_s), 3),
            "turns": {why.value: n for why, n in fleet.routes.items()},
            "stays": dict(fleet.stays),
            "refused": fleet.refused,
            "thrash": fleet.thrash,
            "config": asdict(fleet.config),
        }

    async def metrics(self) -> str:
        """The same figures in Prometheus' text format (docs/metrics.md)."""
        registry = CollectorRegistry()
        registry.register(_FleetCollector(await self.snapshot()))
        return generate_latest(registry).decode()

    async def check(self) -> None:
        """Raise InvariantError unless the tables balance."""
        self.fleet.check()

    # ------------------------------------------------------------------------

    def tokens_of(self, body_bytes: int) -> int:
        """About how many tokens a request's prompt has, by earlier prompts; 1 or more."""
        return max(1, round(body_bytes * self._tokens / self._body_bytes))

    async def _wait_for_reports(self, visible: Collection[str]) -> None:
        """Wait until these replicas have reported their programs, since a new state would take a started
        program for a new one. Waits at most START_WAIT_S for a replica that does not report."""
        while self.now_s() < self._start_until_s and not self._restored.issuperset(visible):
            await asyncio.sleep(POLL_S)

    def _drop_silent(self, now_s: float, visible: Collection[str]) -> None:
        """Drop replicas that have gone without a router's word: it went to an earlier state, or while this
        one was slow. A later report adds one again."""
        for name, place in list(self.fleet.placement.replicas.items()):
            if name not in visible and place.age_s(now_s) > GONE_S:
                self._properties.pop(name, None)
                self.fleet.on_replica_death(now_s, name)

    def _apply(self, now_s: float, event: TurnEvent) -> None:
        if isinstance(event, FirstToken):
            if event.body_bytes:
                self._body_bytes += event.body_bytes
                self._tokens += event.prompt_tokens
            self.fleet.on_first_token(event.turn)
        elif not event.context_tokens:
            self.fleet.on_abort(now_s, event.turn)
        elif event.is_last:
            self.fleet.on_last_turn_end(now_s, event.turn)
        else:
            self.fleet.on_pause(now_s, event.turn, event.context_tokens)

    def _abort(self, turn: TurnId) -> None:
        self._answered.pop(turn, None)
        self.fleet.on_abort(self.now_s(), turn)
        self._admit()

    def _admit(self) -> None:
        """Start programs of the line for which there is room now."""
        self.fleet.admit(self.now_s())
        self._answer_sent()

    def _answer_sent(self) -> None:
        """Answer the waiting requests whose turns were sent."""
        for turn, placed in self._waiting.items():
            if (live := self.fleet.turns.get(turn)) is not None and not placed.done():
                placed.set_result(live.route)

    def _keep_sweeping(self) -> None:
        """While a request waits, time alone can admit it."""
        if self._sweeping is None or self._sweeping.done():
            self._sweeping = asyncio.get_running_loop().create_task(self._sweep())

    async def _sweep(self) -> None:
        while self.fleet.waiting:
            self._admit()
            await asyncio.sleep(SWEEP_S)


class _FleetCollector(Collector):
    """The figures of GET /fleet for Prometheus."""

    def __init__(self, snapshot: Mapping[str, Any]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        for field, (label, text) in COUNTS.items():
            counts = self._snapshot[field] if label else {"": self._snapshot[field]}
            count = CounterMetricFamily(f"continuum_fleet_{field}", text, labels=[label] if label else [])
            for value, n in counts.items():
                count.add_metric([value] if label else [], n)
            yield count
        for field, text in GAUGES.items():
            yield GaugeMetricFamily(f"continuum_fleet_{field}", text, value=self._snapshot[field])
        for field, text in OF_A_REPLICA.items():
            gauge = GaugeMetricFamily(f"continuum_fleet_replica_{field}", text, labels=["replica"])
            for row in self._snapshot["replicas"]:
                gauge.add_metric([str(row.get("rank", row["replica"]))], row[field])
            yield gauge


COUNTS = {  # by field of `snapshot`: label, help
    "turns": ("why", "Turns by the reason for their replica"),
    "stays": ("reason", "Later turns that could have moved, by why they did not"),
    "refused": ("", "New programs that were refused with HTTP 429"),
    "thrash": ("", "Moves of a program within the cooldown; must stay 0"),
}
GAUGES = {
    "line": "Programs in the line",
    "line_wait_seconds": "How long the first in line has waited",
    "programs": "Programs that the fleet knows",
}
OF_A_REPLICA = {
    "report_age_seconds": "Age of the replica's last report",
    "headroom_tokens": "Largest forecast that fits on the replica",
    "programs": "Programs whose home is the replica",
    "requests": "Requests at the replica",
}
