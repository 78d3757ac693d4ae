"""Ray's router, in each proxy: it asks the fleet's state where a turn goes, and answers itself while the
state is away.

It replaces the program's name, which has a hash of the client's credentials in it (names.py), by a keyed
hash: the state and the replicas see no other.

While the state is away (docs/fleet.md), a program that this router did not place may be at home where another
proxy sent it, so it waits for the next state. Ray's ring puts a program's turns on one replica whichever
proxy they pass, and the state learns of that home from the replica's report. A replica that this router does
not see, since it died or drains, gets no turn: the state is asked again without it.

Seam, read and run on Ray 2.60.0 (its API is alpha): RequestRouter._choose_replica_for_request, ._backoff and
.curr_replicas; ConsistentHashRouter.choose_replicas, whose ranks have one element each, and ._routing_key;
PendingRequest.metadata.session_id, .internal_request_id; the name of a deployment actor.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.serve._private.constants import SERVE_DEPLOYMENT_ACTOR_PREFIX, SERVE_NAMESPACE
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from continuum_lmcache.bounded_dict import BoundedDict
from continuum_lmcache.fleet.fleet import Route
from continuum_lmcache.programs.identity import hidden
from continuum_lmcache.serve.names import NameTurns, TurnName
from continuum_lmcache.types import MOST_PROGRAMS

logger = logging.getLogger("ray.serve")
SHORT_S = 0.5  # for the state's answer, where this router sent the program before, or it is new
PATIENCE_S = 15.0  # else, from the first question in vain: its successor's came within 6 s, on a busy machine
POLL_S = 0.1  # between two looks for another state
MOST_GONE = 8  # replicas that the state names for one turn, and that this router does not see
FULL_BACKOFF = 3  # the backoff's step before a turn that a full replica refused is sent there again: 0.2 s


class ProgramRouter(ConsistentHashRouter):
    def initialize_state(self, **kwargs: Any) -> None:
        """`key`: of programs' names, hexadecimal, the same in all routers. `api_keys`: their digests."""
        self._key = bytes.fromhex(kwargs.pop("key"))
        NameTurns.key_digests = frozenset(map(bytes.fromhex, kwargs.pop("api_keys")))
        super().initialize_state(**kwargs)
        self._state: Any = None
        self._wait_until_s: float | None = None  # None: the state has answered the last question
        self._look_at_s = 0.0
        self._homes: BoundedDict[str, str] = BoundedDict(MOST_PROGRAMS)

    def _replica(self, name: str) -> RunningReplica | None:
        """The replica of that name, if this router sees it."""
        found: RunningReplica | None = self.curr_replicas.get(ReplicaID(name, self._deployment_id))
        return found

    def _routing_key(self, pending_request: PendingRequest | None) -> str | None:
        """The text that the ring hashes: the program's name."""
        if pending_request is None:
            return None
        metadata = pending_request.metadata
        return TurnName.parse(metadata.session_id).program or str(metadata.internal_request_id)

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Where the request goes. `is_retry`: the replica of the last answer did not take it."""
        turn = TurnName.parse(pending_request.metadata.session_id)
        if turn.program and not is_retry:  # on a retry it was done already
            turn = replace(turn, program=hidden(turn.program, self._key))
            pending_request.metadata.session_id = str(turn)
        if turn.rank is not None:  # if none has this rank, any: its answer names it
            for replica in self.curr_replicas.values():
                if replica.replica_metadata.get("rank") == turn.rank:
                    return replica
        if is_retry:
            await self._backoff(FULL_BACKOFF)
        chosen = await self._ask_state(pending_request, turn) if turn.is_turn else None
        chosen = chosen or await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        if turn.program:
            self._homes[turn.program] = chosen.replica_id.unique_id
        return chosen

    async def _ask_state(self, pending_request: PendingRequest, turn: TurnName) -> RunningReplica | None:
        """The state's choice; where this router sent the program last, if the state does not answer or knows
        no replica that is here. None: it has not."""
        gone: list[str] = []
        home = self._replica(self._homes.get(turn.program, ""))
        waits = home is None and bool(turn.program) and not turn.is_first
        now_s = asyncio.get_running_loop().time()
        if self._wait_until_s is None:
            self._wait_until_s = now_s + PATIENCE_S
        patience_s = max(SHORT_S, self._wait_until_s - now_s) if waits else SHORT_S
        try:
            async with asyncio.timeout(patience_s):  # wait_for of Python 3.11 can lose a cancellation
                while len(gone) < MOST_GONE and (answer := await self._answer(turn, gone)) is not None:
                    if (chosen := self._replica(answer.replica)) is not None:
                        turns, age_s, why = answer.program_turns, answer.program_age_s, answer.why.value
                        turn = replace(turn, turns=turns, age_s=age_s, why=why)
                        pending_request.metadata.session_id = str(turn)
                        return chosen
                    gone.append(answer.replica)
        except TimeoutError:
            self._state = None
            if waits:
                logger.warning("The fleet's state does not answer: this router places programs by a hash")
        return home

    async def _answer(self, turn: TurnName, gone: list[str]) -> Route | None:
        """The state's, or its successor's."""
        while True:
            now_s = asyncio.get_running_loop().time()
            if self._state is None and now_s >= self._look_at_s:
                self._look_at_s = now_s + POLL_S
                with suppress(ValueError):  # it died just now
                    self._state = self._find_state()
            if (state := self._state) is not None:
                try:
                    asked = turn.program, not turn.stays, len(self.curr_replicas), gone
                    answer: Route | None = await state.place_turn.remote(*asked)
                    self._wait_until_s = None
                    return answer
                except RayError:
                    self._state = None if self._state is state else self._state
            await asyncio.sleep(POLL_S)

    def _find_state(self) -> Any:
        """The actor by its name; None: it does not exist at the moment."""
        ours = self._deployment_id
        start = f"{SERVE_DEPLOYMENT_ACTOR_PREFIX}{ours.app_name}::{ours.name}::"
        for named in ray.util.list_named_actors(all_namespaces=True):
            if named["namespace"] == SERVE_NAMESPACE and named["name"].startswith(start):
                return ray.get_actor(named["name"], namespace=SERVE_NAMESPACE)
        return None
