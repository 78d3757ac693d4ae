"""Ray's own router class with our state: a proxy's decisions while the state answers, and while it does not.

Runs where Ray is installed; no cluster is started.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from virtual_loop import VirtualLoop

pytest.importorskip("ray")

from ray.exceptions import RayActorError
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve._private.constants import SERVE_DEPLOYMENT_ACTOR_PREFIX, SERVE_NAMESPACE
from ray.serve.request_router import PendingRequest

from continuum_lmcache.config import ContinuumConfig
from continuum_lmcache.fleet.fleet import ReplicaId, Route, RouteReason
from continuum_lmcache.programs.identity import key_digest
from continuum_lmcache.serve.names import NameTurns, TurnName
from continuum_lmcache.serve.router import PATIENCE_S, POLL_S, SHORT_S, ProgramRouter

pytestmark = pytest.mark.anyio
OURS = DeploymentID(name="vllm", app_name="default")


@pytest.fixture
def anyio_backend() -> Any:
    return "asyncio", {"loop_factory": VirtualLoop}


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


def named(*words: Any) -> str:
    """The program of a question."""
    return str(words[0])


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
    made._find_state = lambda: its_state  # type: ignore[method-assign]
    made.update_replicas([replica(name, rank) for rank, name in enumerate(names)])
    return made


def turn(number: int = 1, **named: Any) -> PendingRequest:
    about = RequestMetadata(f"r{number}", f"t{number}", session_id=str(TurnName(**named)))
    return PendingRequest(args=[], kwargs={}, metadata=about)


async def sent(made: ProgramRouter, pending: PendingRequest, **how: Any) -> str:
    chosen = await made._choose_replica_for_request(pending, **how)
    return str(chosen.replica_id.unique_id)


async def test_a_turn_goes_where_the_state_sends_it_with_its_programs_turns_and_age() -> None:
    made = router(state(goes_to("b", program_turns=3, program_age_s=7.5)), "a", "b")
    pending = turn(program="p")
    assert await sent(made, pending) == "b"
    told = TurnName.parse(pending.metadata.session_id)
    assert (told.turns, told.age_s, told.why) == (3, 7.5, "home")


async def test_the_state_and_the_replica_get_a_keyed_hash_of_the_programs_name() -> None:
    """The same from every router of the deployment, also for a turn that is routed again."""

    async def named_by(key: bytes) -> tuple[str, ...]:
        made = router(state(goes_to("a")), "a", key=key)
        pending = turn(program="run-42@hash-of-a-credential")
        await sent(made, pending)
        at_the_replica = TurnName.parse(pending.metadata.session_id).program
        await sent(made, pending, is_retry=True)
        return (*(named(*words) for words in made._state.place_turn.calls), at_the_replica)

    first, again, at_the_replica = await named_by(b"key")
    assert first == again == at_the_replica and len(first) == 32
    assert "run-42" not in first and "credential" not in first
    assert (first, first, first) == await named_by(b"key") != await named_by(b"other")


async def test_turns_wait_for_the_next_state_and_go_where_it_sends_them() -> None:
    made = router(state(away), "a", "b")
    made._find_state = lambda: None  # type: ignore[method-assign]
    turns = [asyncio.create_task(sent(made, turn(i, program=f"p{i}"))) for i in range(4)]
    await asyncio.sleep(PATIENCE_S / 2)
    assert not any(each.done() for each in turns)
    made._find_state = lambda: state(goes_to("b"))  # type: ignore[method-assign]
    assert [await each for each in turns] == ["b"] * 4


async def test_while_no_state_answers_a_turn_goes_where_its_program_was_sent_before_at_once() -> None:
    made, now_s = router(state(goes_to("b")), "a", "b", "c"), asyncio.get_running_loop().time
    assert await sent(made, turn(1, program="p")) == "b"
    made._state = None
    made._find_state = lambda: None  # type: ignore[method-assign]
    for number in range(2, 5):
        began_s = now_s()
        assert await sent(made, turn(number, program="p")) == "b"
        assert now_s() - began_s == pytest.approx(SHORT_S)
    new = asyncio.create_task(sent(made, turn(9, program="new")))
    await asyncio.sleep(1.0)
    assert not new.done(), "a program that another proxy may have placed waits for the state"
    made._find_state = lambda: state(goes_to("c"))  # type: ignore[method-assign]
    assert [await new, await sent(made, turn(5, program="p"))] == ["c", "c"], "the next state decides again"


async def test_while_no_state_answers_what_has_no_home_yet_goes_by_the_ring_at_once() -> None:
    made, now_s = router(state(away), "a", "b", "c"), asyncio.get_running_loop().time
    waits_s, there = [], []
    for number, named in enumerate(({"program": "new", "is_first": True}, {"program": "new"}, {})):
        began_s = now_s()
        there.append(await sent(made, turn(number, **named)))
        waits_s.append(now_s() - began_s)
    assert waits_s == pytest.approx([SHORT_S] * 3) and there[0] == there[1]
    began_s = now_s()
    await sent(made, turn(9, program="may be at home somewhere"))
    assert now_s() - began_s == pytest.approx(PATIENCE_S - 3 * SHORT_S)


async def test_a_turn_goes_by_the_ring_if_its_programs_last_replica_died_with_the_state() -> None:
    made = router(state(goes_to("b")), "a", "b")
    assert await sent(made, turn(1, program="p")) == "b"
    made._state = None
    made._find_state = lambda: None  # type: ignore[method-assign]
    made.on_replica_actor_died(ReplicaID("b", OURS))
    assert await sent(made, turn(2, program="p")) == "a"


async def test_if_no_state_comes_turns_go_by_the_ring_and_a_program_stays_together() -> None:
    made, now_s = router(state(away), "a", "b", "c"), asyncio.get_running_loop().time
    new = {await sent(made, turn(10 + i, program=f"new-{i}")) for i in range(30)}
    assert new == {"a", "b", "c"}
    assert now_s() < PATIENCE_S + 31 * SHORT_S, "the first one alone waited long"
    again = [await sent(made, turn(50 + i, program="new-1")) for i in range(4)]
    assert len(set(again)) == 1
    found = state(goes_to("b"))
    made._find_state = lambda: found  # type: ignore[method-assign]
    await asyncio.sleep(POLL_S)
    assert await sent(made, turn(99, program="new-1")) == "b"


async def test_no_turn_waits_for_the_state_longer_than_the_first_one_or_half_the_limit_of_first_tokens() -> (
    None
):
    made, now_s = router(state(away), "a", "b"), asyncio.get_running_loop().time

    async def waits_s_of(number: int) -> float:
        await asyncio.sleep(number * PATIENCE_S / 4)
        began_s = now_s()
        await sent(made, turn(number, program=f"p{number}"))
        return now_s() - began_s

    waits_s = await asyncio.gather(*map(waits_s_of, range(4)))
    assert waits_s == pytest.approx([PATIENCE_S * part for part in (1, 3 / 4, 1 / 2, 1 / 4)])
    assert max(waits_s) <= ContinuumConfig().first_token_limit_s / 2


async def test_the_state_is_asked_again_without_the_replicas_that_this_router_does_not_see() -> None:
    made = router(state(lambda *words: goes_to("b" if "a" in words[-1] else "a")()), "a", "b")
    assert await sent(made, turn(1, program="p")) == "a"
    made.on_replica_actor_died(ReplicaID("a", OURS))
    assert await sent(made, turn(2, program="p")) == "b"
    made._state.place_turn.answer = goes_to("nowhere")
    assert await sent(made, turn(3, program="p")) == "b", "the ring's, after a few questions"


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


async def test_the_state_hears_how_many_replicas_this_router_sees() -> None:
    made = router(state(goes_to("b")), "a", "b")
    for there in (("a", "b"), ("b",)):
        made.update_replicas([replica(name, rank) for rank, name in enumerate(there)])
        assert await sent(made, turn(program="p")) == "b"
        assert made._state.place_turn.calls[-1][1:] == (True, len(there), [])


async def test_a_state_that_was_away_is_looked_up_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    made = router(state(away), "a", "b")
    del made._find_state  # the class's own
    found = state(goes_to("b"))
    actor = {"namespace": SERVE_NAMESPACE, "name": SERVE_DEPLOYMENT_ACTOR_PREFIX + "default::vllm::x"}
    monkeypatch.setattr("ray.util.list_named_actors", lambda **_: [actor])
    answers = iter([ValueError("it died after it was listed"), found])

    def get_actor(*_: Any, **__: Any) -> Any:
        if isinstance(answer := next(answers), ValueError):
            raise answer
        return answer

    monkeypatch.setattr("ray.get_actor", get_actor)
    assert await sent(made, turn(2, program="q")) == "b"


async def test_a_state_that_hangs_holds_up_the_first_turns_and_later_ones_for_a_moment() -> None:
    its, now_s = state(away), asyncio.get_running_loop().time
    its.place_turn.remote = lambda *_: asyncio.get_running_loop().create_future()
    made, waits_s = router(its, "a"), []
    for number in range(4):
        began_s = now_s()
        assert await sent(made, turn(number, program="p")) == "a"
        waits_s.append(now_s() - began_s)
    assert waits_s == pytest.approx([PATIENCE_S, SHORT_S, SHORT_S, SHORT_S])


async def test_the_proxy_learns_the_replicas_api_keys_as_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NameTurns, "key_digests", frozenset())
    made = router(state(away), "a")
    assert not NameTurns.key_digests
    made.initialize_state(key=b"key".hex(), api_keys=[key_digest("secret").hex()])
    assert NameTurns.key_digests == {key_digest("secret")}
