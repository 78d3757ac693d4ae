"""Ray's own router class with our state: a proxy's decisions while the state answers, and while it does not.

Runs where Ray is installed; no cluster is started.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import RayActorError
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve._private.constants import SERVE_DEPLOYMENT_ACTOR_PREFIX, SERVE_NAMESPACE
from ray.serve.request_router import PendingRequest

from continuum_lmcache.fleet.fleet import ReplicaId, Route, RouteReason
from continuum_lmcache.serve.names import ApiKeys, TurnHeader
from continuum_lmcache.serve.router import ProgramRouter

pytestmark = pytest.mark.anyio
OURS = DeploymentID(name="vllm", app_name="default")


class Remote:
    """A method of an actor: `answer` computes its answer; every call is kept."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        self.answer, self.calls = answer, []  # type: ignore[var-annotated]

    def remote(self, *words: object) -> Coroutine[Any, Any, Any]:
        self.calls.append(words)

        async def answered() -> Any:
            return self.answer(*words)

        return asyncio.ensure_future(answered())  # type: ignore[return-value]


def state(place_turn: Callable[..., Any]) -> SimpleNamespace:
    return SimpleNamespace(place_turn=Remote(place_turn))


def goes_to(name: str, **did: Any) -> Callable[..., Route]:
    return lambda *_: Route(ReplicaId(name), RouteReason.HOME, **did)


def away(*_: object) -> None:
    raise RayActorError


def replica(name: str, rank: int) -> Any:
    """As much of Ray's RunningReplica as routers look at."""

    async def queue_len(*, deadline_s: float) -> int:  # noqa: ARG001
        return 0

    return SimpleNamespace(
        replica_id=ReplicaID(name, OURS),
        replica_metadata={"rank": rank},
        max_ongoing_requests=10,
        get_queue_len=queue_len,
        push_proxy_handle=lambda _: None,
    )


def router(its_state: Any, *names: str, key: bytes = b"key") -> ProgramRouter:
    made = ProgramRouter(
        deployment_id=OURS,
        handle_source=DeploymentHandleSource.REPLICA,
        self_actor_id="x",
        use_replica_queue_len_cache=False,
    )
    made.initialize_state(key=key.hex(), api_keys=[])
    made._state = its_state
    made._state_actor = lambda: made._state  # type: ignore[method-assign]
    made.update_replicas([replica(name, rank) for rank, name in enumerate(names)])
    return made


def turn(number: int = 1, **named: Any) -> PendingRequest:
    about = RequestMetadata(f"r{number}", f"t{number}", session_id=str(TurnHeader(**named)))
    return PendingRequest(args=[], kwargs={}, metadata=about)


async def sent(made: ProgramRouter, pending: PendingRequest, **how: Any) -> str:
    chosen = await made._choose_replica_for_request(pending, **how)
    return str(chosen.replica_id.unique_id)


async def test_a_turn_goes_where_the_state_sends_it_with_its_programs_turns_and_age() -> None:
    made = router(state(goes_to("b", program_turns=3, program_age_s=7.5)), "a", "b")
    pending = turn(program="p")
    assert await sent(made, pending) == "b"
    told = TurnHeader.parse(pending.metadata.session_id)
    assert (told.turns, told.age_s, told.why) == (3, 7.5, "home")


async def test_the_state_and_the_replica_get_a_keyed_hash_of_the_programs_name() -> None:
    """The same from every router of the deployment, also for a turn that is routed again."""

    async def named_by(key: bytes) -> tuple[str, ...]:
        made = router(state(goes_to("a")), "a", key=key)
        pending = turn(program="run-42@hash-of-a-credential")
        await sent(made, pending)
        at_the_replica = TurnHeader.parse(pending.metadata.session_id).program
        await sent(made, pending, is_retry=True)
        return (*(named.program for named, *_ in made._state.place_turn.calls), at_the_replica)

    first, again, at_the_replica = await named_by(b"key")
    assert first == again == at_the_replica and len(first) == 32
    assert "run-42" not in first and "credential" not in first
    assert (first, first, first) == await named_by(b"key") != await named_by(b"other")


async def test_while_the_state_is_away_programs_keep_their_replica_and_new_ones_are_hashed() -> None:
    made = router(state(goes_to("b")), "a", "b", "c")
    assert await sent(made, turn(1, program="p")) == "b"
    made._state = state(away)
    assert await sent(made, turn(2, program="p")) == "b"
    assert made._state is None, "and is looked up anew"
    new = {await sent(made, turn(10 + i, program=f"new-{i}")) for i in range(30)}
    assert new == {"a", "b", "c"}
    again = [await sent(made, turn(50 + i, program="new-1")) for i in range(4)]
    assert len(set(again)) == 1


async def test_a_program_whose_replica_is_gone_while_the_state_is_away_finds_another() -> None:
    made = router(state(goes_to("b")), "a", "b")
    await sent(made, turn(1, program="p"))
    made.on_replica_actor_died(ReplicaID("b", OURS))
    made._state = state(away)
    assert await sent(made, turn(2, program="p")) == "a"


async def test_the_state_learns_where_this_router_sent_a_program_until_its_last_turn() -> None:
    made = router(state(goes_to("b")), "a", "b")
    homes = []
    for number, is_last in enumerate((False, False, True, False)):
        await sent(made, turn(number, program="p", is_last=is_last))
        *_, home = made._state.place_turn.calls[-1]
        homes.append(home)
    assert homes == [None, "b", "b", None]
    made.on_replica_actor_died(ReplicaID("b", OURS))
    made._state.place_turn.answer = goes_to("a")
    await sent(made, turn(9, program="p"))
    assert made._state.place_turn.calls[-1][-1] is None, "what is gone is no home"


async def test_a_question_goes_to_the_replica_it_is_for_and_no_question_is_a_turn() -> None:
    made = router(state(away), "a", "b")
    for rank, name in enumerate("ab"):
        assert await sent(made, turn(rank, is_turn=False, rank=rank)) == name
    assert await sent(made, turn(7, is_turn=False)) in "ab"
    assert await sent(made, turn(8, is_turn=False, rank=9)) in "ab", "its answer says which it is"
    assert made._state.place_turn.calls == []


async def test_the_fallbacks_ranks_have_one_element_each() -> None:
    made = router(None, "a", "b", "c")
    ranks = await made.choose_replicas(made._replicas_list, turn(program="p"))
    assert len(ranks) == 3 and all(len(rank) == 1 for rank in ranks)


async def test_the_state_hears_which_replicas_this_router_sees() -> None:
    made = router(state(goes_to("a")), "a", "b")
    for there in (("a", "b"), ("b",)):
        made.update_replicas([replica(name, rank) for rank, name in enumerate(there)])
        assert await sent(made, turn(program="p")) in there, "what is gone gets no turn"
        assert made._state.place_turn.calls[-1][1] == there


async def test_a_state_that_was_away_is_looked_up_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    made = router(state(away), "a", "b")
    del made._state_actor  # the class's own
    await sent(made, turn(program="p"))
    found = state(goes_to("b"))
    named = {"namespace": SERVE_NAMESPACE, "name": SERVE_DEPLOYMENT_ACTOR_PREFIX + "default::vllm::x"}
    monkeypatch.setattr("ray.util.list_named_actors", lambda **_: [named])
    monkeypatch.setattr("ray.get_actor", lambda *_, **__: found)
    made._retry_at_s = 0.0
    assert await sent(made, turn(2, program="q")) == "b"


async def test_a_state_that_is_too_slow_holds_no_turn_up_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("continuum_lmcache.serve.router.ANSWER_S", 0.01)
    its = state(away)
    its.place_turn.remote = lambda *_: asyncio.get_running_loop().create_future()
    assert await sent(router(its, "a"), turn(program="p")) == "a"


async def test_the_proxy_learns_the_replicas_api_keys_as_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ApiKeys, "hashes", frozenset())
    made = router(state(away), "a")
    assert ApiKeys.accept("")
    made.initialize_state(key=b"key".hex(), api_keys=[sha256(b"secret").hexdigest()])
    assert ApiKeys.accept("Bearer secret") and not ApiKeys.accept("")
