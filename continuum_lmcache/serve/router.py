"""Ray's router, in each proxy: it asks the fleet's state where a turn goes, and uses a hash ring if the
state does not answer.

It replaces the program's name, which has a hash of the client's credentials in it (names.py), by a keyed
hash. The state and the replicas see no other name. The key is in the application's config, which
Serve's controller keeps: the same in all routers.

It knows no program's home. While the state is away turns wait for the next one, PATIENCE_S at most since it
went; then they go by Ray's ring, which puts a program's turns on one replica whichever proxy they pass, and
the state learns of that home from the replica's report. A replica that this router does not see, since it
died or drains, gets no turn: the state is asked again without it.

Seam, read and run on Ray 2.60.0 (its API is alpha): RequestRouter._choose_replica_for_request,
.update_replicas, .on_replica_actor_died, ._backoff; ConsistentHashRouter.choose_replicas, whose ranks have
one element each, and ._routing_key; PendingRequest.metadata.session_id, .internal_request_id; the name of a
deployment actor.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.serve._private.constants import SERVE_DEPLOYMENT_ACTOR_PREFIX, SERVE_NAMESPACE
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from continuum_lmcache.serve.names import ApiKeys, TurnName, hidden

logger = logging.getLogger("ray.serve")
PATIENCE_S = 10.0  # for the state's answer, or another state: a new one waits 5 s for the replicas' reports
RETRY_S = 1.0  # between two looks for another state; and for its answer, once the patience is over
POLL_S = 0.1  # between two looks whether it was found
MOST_GONE = 8  # replicas that the state names for one turn, and that this router does not see
FULL_BACKOFF = 3  # the backoff's step before a turn that a full replica refused is sent there again: 0.2 s


class ProgramRouter(ConsistentHashRouter):
    """One in each proxy, and in each handle of the deployment."""

    def initialize_state(self, **kwargs: Any) -> None:
        """`key`: of programs' names, hexadecimal, the same in all routers. `api_keys`: ApiKeys.hashes, as
        hexadecimal."""
        self._key = bytes.fromhex(kwargs.pop("key"))
        ApiKeys.hashes = frozenset(map(bytes.fromhex, kwargs.pop("api_keys")))
        super().initialize_state(**kwargs)
        self._state: Any = None
        self._away_s: float | None = None  # since when the state has not answered
        self._retry_at_s = 0.0
        self._by_name: dict[str, RunningReplica] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Ray's controller reports the replicas."""
        super().update_replicas(replicas)
        self._by_name = {r.replica_id.unique_id: r for r in replicas}

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """A request found it dead, before the controller did."""
        super().on_replica_actor_died(replica_id)
        self._by_name.pop(replica_id.unique_id, None)

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
        if turn.rank is not None:
            return await self._of_rank(pending_request, turn.rank)
        if is_retry:
            await self._backoff(FULL_BACKOFF)
        chosen = await self._ask_state(pending_request, turn) if turn.is_turn else None
        return chosen or await super()._choose_replica_for_request(pending_request, is_retry=is_retry)

    async def _of_rank(self, pending_request: PendingRequest, rank: int) -> RunningReplica:
        """The requested replica; if none has this rank, any: its answer names it."""
        for replica in self._by_name.values():
            if replica.replica_metadata.get("rank") == rank:
                return replica
        return await super()._choose_replica_for_request(pending_request)

    async def _ask_state(self, pending_request: PendingRequest, turn: TurnName) -> RunningReplica | None:
        """The state's choice. None: it does not answer, or knows no replica that is here."""
        now_s, gone = asyncio.get_running_loop().time, list[str]()
        while len(gone) < MOST_GONE and (state := await self._state_actor()) is not None:
            asked_s = now_s()
            limit_s = PATIENCE_S if self._away_s is None else self._away_s + PATIENCE_S - asked_s
            try:
                placed = state.place_turn.remote(turn.program, not turn.stays, len(self._by_name), gone)
                async with asyncio.timeout(max(limit_s, RETRY_S)):  # wait_for of 3.11 can lose a cancellation
                    answer = await placed
            except (RayError, TimeoutError) as error:
                logger.warning("The fleet's state does not answer (%s): turns wait for the next one", error)
                if self._state is state:
                    self._state = None
                    self._away_s = asked_s if self._away_s is None else self._away_s
                    self._retry_at_s = now_s() + POLL_S
                continue
            self._away_s = None
            if answer is None:
                return None
            if (chosen := self._by_name.get(answer.replica)) is not None:
                turn = replace(
                    turn, turns=answer.program_turns, age_s=answer.program_age_s, why=answer.why.value
                )
                pending_request.metadata.session_id = str(turn)
                return chosen
            gone.append(answer.replica)
        return None

    async def _state_actor(self) -> Any:
        """The state's actor. None: it has been away for PATIENCE_S, and is not back."""
        now_s = asyncio.get_running_loop().time
        while self._state is None:
            if now_s() >= self._retry_at_s:
                self._retry_at_s = now_s() + RETRY_S
                self._state = self._find_state()
                self._away_s = now_s() if self._state is None and self._away_s is None else self._away_s
            elif self._away_s is not None and now_s() >= self._away_s + PATIENCE_S:
                return None
            else:
                await asyncio.sleep(POLL_S)
        return self._state

    def _find_state(self) -> Any:
        """The actor by its name; None: it does not exist at the moment."""
        ours = f"{self._deployment_id.app_name}::{self._deployment_id.name}::"
        start = SERVE_DEPLOYMENT_ACTOR_PREFIX + ours
        for named in ray.util.list_named_actors(all_namespaces=True):
            if named["namespace"] == SERVE_NAMESPACE and named["name"].startswith(start):
                return ray.get_actor(named["name"], namespace=SERVE_NAMESPACE)
        return None
