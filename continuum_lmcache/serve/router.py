"""Ray's router, in each proxy: it asks the fleet's state where a turn goes, and uses a hash ring if the
state does not answer.

It replaces the program's name, which has a hash of the client's credentials in it (names.py), by a keyed
hash. The state and the replicas see no other name. The key is in the application's config, which
Serve's controller keeps: the same in all routers, and for the state's actor after each restart.

Without the state a program continues where this router last sent it, and otherwise where Ray's ring puts it.
The state learns of that home with the program's next turn. A replica that this router does not see, since it
died or drains, gets no turn: each question says which it sees.

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

from continuum_lmcache.bounded_dict import BoundedDict
from continuum_lmcache.serve.names import ApiKeys, TurnHeader, hidden
from continuum_lmcache.types import MOST_PROGRAMS

logger = logging.getLogger("ray.serve")
STATE_RETRY_S = 1.0  # after a state that did not answer; until then no request waits for it
ANSWER_S = 10.0  # for the state's answer: a new one waits 5 s for the replicas' reports
FULL_BACKOFF = 3  # the backoff's step before a turn that a full replica refused is sent there again: 0.2 s


class ProgramRouter(ConsistentHashRouter):
    """One in each proxy, and in each handle of the deployment."""

    def initialize_state(self, **kwargs: Any) -> None:
        """`key`: of programs' names, hexadecimal, the same in all routers. `api_keys`: ApiKeys.hashes, as
        hexadecimal."""
        self._key = bytes.fromhex(kwargs.pop("key"))
        ApiKeys.hashes = frozenset(map(bytes.fromhex, kwargs.pop("api_keys")))
        super().initialize_state(**kwargs)
        self._homes: BoundedDict[str, str] = BoundedDict(MOST_PROGRAMS)  # by the program's hash
        self._state: Any = None
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
        return TurnHeader.parse(metadata.session_id).program or str(metadata.internal_request_id)

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Where the request goes. `is_retry`: the replica of the last answer did not take it."""
        turn = TurnHeader.parse(pending_request.metadata.session_id)
        if turn.program and not is_retry:  # on a retry it was done already
            turn = replace(turn, program=hidden(turn.program, self._key))
            pending_request.metadata.session_id = str(turn)
        if turn.rank is not None:
            return await self._of_rank(pending_request, turn.rank)
        if not turn.is_turn:
            return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        home = self._homes.get(turn.program)
        home = home if home in self._by_name else None
        if is_retry:
            await self._backoff(FULL_BACKOFF)
        chosen = await self._ask_state(pending_request, turn, home)
        if chosen is None and home is not None:
            chosen = self._by_name.get(home)
        if chosen is None:
            chosen = await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        if turn.is_last:
            self._homes.pop(turn.program, None)  # the next program of that name is a new one
        elif turn.program:
            self._homes[turn.program] = chosen.replica_id.unique_id
        return chosen

    async def _of_rank(self, pending_request: PendingRequest, rank: int) -> RunningReplica:
        """The requested replica; if none has this rank, any: its answer names it."""
        for replica in self._by_name.values():
            if replica.replica_metadata.get("rank") == rank:
                return replica
        return await super()._choose_replica_for_request(pending_request)

    async def _ask_state(
        self, pending_request: PendingRequest, turn: TurnHeader, home: str | None
    ) -> RunningReplica | None:
        """The state's choice. None: it does not answer, or knows no replica that is here."""
        state = self._state_actor()
        if state is None:
            return None
        try:
            placed = state.place_turn.remote(turn, tuple(self._by_name), home)
            async with asyncio.timeout(ANSWER_S):  # wait_for of Python 3.11 can lose a cancellation
                answer = await placed
        except (RayError, TimeoutError) as error:
            logger.warning(
                "The fleet's state does not answer (%s): this router places turns by its own table", error
            )
            if self._state is state:
                self._state = None
                self._retry_at_s = asyncio.get_running_loop().time() + STATE_RETRY_S
            return None
        if answer is None:
            return None
        turn = replace(turn, turns=answer.program_turns, age_s=answer.program_age_s, why=answer.why.value)
        pending_request.metadata.session_id = str(turn)
        return self._by_name.get(answer.replica)

    def _state_actor(self) -> Any:
        """The state's actor; None: it does not exist at the moment."""
        now_s = asyncio.get_running_loop().time()
        if self._state is None and now_s >= self._retry_at_s:
            self._retry_at_s = now_s + STATE_RETRY_S
            ours = f"{self._deployment_id.app_name}::{self._deployment_id.name}::"
            start = SERVE_DEPLOYMENT_ACTOR_PREFIX + ours
            for named in ray.util.list_named_actors(all_namespaces=True):
                if named["namespace"] == SERVE_NAMESPACE and named["name"].startswith(start):
                    self._state = ray.get_actor(named["name"], namespace=SERVE_NAMESPACE)
        return self._state
