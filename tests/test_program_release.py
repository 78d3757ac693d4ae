"""`POST /programs/release`: a client's word that its program has ended."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from bench import Bench, prompt
from entry_points import app

from continuum_lmcache.programs.identity import OWNER_FIELD, program_id
from continuum_lmcache.types import PinEnd
from continuum_lmcache.vllm_plugin.hooks import api_keys, program_release


@pytest.fixture
def bench(make: Any) -> Bench:
    return make(60, policy="static-ttl")


def test_a_released_programs_pin_ends_and_its_record_goes(bench: Bench) -> None:
    bench.turn("p", prompt(64))
    assert bench.engine.pins.pinned
    bench.scheduler.on_release("p")
    assert not bench.engine.pins.pinned and not bench.engine.programs.records
    assert bench.engine.pins.outcomes[PinEnd.ENDED] == 1


def test_a_turn_that_runs_when_its_program_is_released_is_its_last(bench: Bench) -> None:
    bench.send("p", prompt(64), out=3)
    bench.step()
    bench.scheduler.on_release("p")
    bench.run_until_idle()
    assert not bench.engine.pins.taken and not bench.engine.programs.records


def test_the_release_of_a_name_that_nobody_has_changes_nothing(bench: Bench) -> None:
    bench.turn("p", prompt(64))
    pinned = dict(bench.engine.pins.pinned)
    for name in ("other", "p@", "", program_id("p", "a tenant")):
        bench.scheduler.on_release(name)
    assert bench.engine.pins.pinned == pinned


def test_a_released_program_that_comes_back_is_served_and_the_claim_counts_as_wrong(bench: Bench) -> None:
    tokens = bench.turn("p", prompt(64))
    bench.scheduler.on_release("p")
    bench.turn("p", [*tokens, 5])
    assert bench.engine.end_claims[""].wrong == 1 and "p" in bench.engine.programs.records


def post(body: Any, key: str = "", keys: tuple[str, ...] = ()) -> tuple[httpx.Response, list[Any]]:
    """The answer of an API server to a release, and what its engine was told."""
    served, told = app([*keys]), list[Any]()

    async def call(*args: Any) -> None:
        told.append(args)

    served.state.engine_client = SimpleNamespace(engine_core=SimpleNamespace(call_utility_async=call))

    async def sent() -> httpx.Response:
        transport = httpx.ASGITransport(app=served)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            given: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {"json": body}
            return await client.post(program_release.PATH, headers=headers, **given)

    return asyncio.run(sent()), told


def test_the_api_server_tells_the_engine_the_programs_name() -> None:
    response, told = post({"program_id": "p"})
    assert response.json() == {"program_id": "p", "released": True}
    assert told == [("continuum_release", "p")]


def test_a_key_ends_its_own_programs_alone() -> None:
    _, [(_, ann)] = post({"program_id": "p"}, "key-of-ann", ("key-of-ann", "key-of-bob"))
    _, [(_, bob)] = post({"program_id": "p"}, "key-of-bob", ("key-of-ann", "key-of-bob"))
    _, [(_, nobody)] = post({"program_id": "p"}, "another", ("key-of-ann", "key-of-bob"))
    assert nobody not in (ann, bob)
    assert ann == program_id("p", f"{api_keys.owner_of('Bearer key-of-ann', ['key-of-ann'])}/") != bob


@pytest.mark.parametrize(
    "body",
    [{}, {"program_id": ""}, {"program_id": ["p"]}, [], "p", None, pytest.param(b"[" * 100_000, id="deep")],
)
def test_a_bad_body_gets_400_with_what_to_send(body: Any) -> None:
    response, told = post(body)
    assert response.status_code == 400 and "program_id" in response.text and not told


def test_an_owner_in_the_body_is_nobodys_word() -> None:
    _, told = post({"program_id": "p", OWNER_FIELD: "somebody"})
    assert told == [("continuum_release", "p")]
