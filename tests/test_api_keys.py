"""Clients that differ only by their API keys: a program belongs to the key of its first request."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from bench import Bench, prompt
from entry_points import BODIES, app, post, send, to_engine
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from continuum_lmcache.programs.identity import OWNER_FIELD
from continuum_lmcache.vllm_plugin.hooks import api_keys, request_fields, wrapping
from continuum_lmcache.vllm_plugin.live import routes

KEYS = ["key-of-ann", "key-of-bob"]


@pytest.fixture
def bench(make: Any, tmp_path: Path) -> Bench:
    return make(60, run_output_dir=tmp_path)


@pytest.mark.parametrize("path", BODIES)
def test_each_endpoint_says_whose_request_it_is_and_never_by_the_key(path: str) -> None:
    served = app(KEYS)
    ann, bob, again = (post(served, path, key, job_id="j") for key in (*KEYS, KEYS[0]))
    assert ann["job_id"] == "j" and ann[OWNER_FIELD] == again[OWNER_FIELD] != bob[OWNER_FIELD]
    assert not any(key in json.dumps([ann, bob]) for key in KEYS)


@pytest.mark.parametrize(("keys", "answer"), [(KEYS[:1], 200), (KEYS, 403)])
def test_what_programs_do_is_told_to_who_has_the_only_key(keys: list[str], answer: int) -> None:
    """vLLM's own authentication guards our routes, which are added when the application starts."""
    served = app(keys)
    served.state.engine_client = SimpleNamespace(engine_core=SimpleNamespace(core_engines=[]))

    async def ask(key: str | None) -> int:
        async with served.router.lifespan_context(served):
            routes.add_to(served)
            routes.add_to(served)  # an application may be started twice
            transport = httpx.ASGITransport(served)
            async with httpx.AsyncClient(transport=transport, base_url="http://h") as client:
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                return (await client.get("/v1/continuum/programs", headers=headers)).status_code

    assert [asyncio.run(ask(key)) for key in (None, "other", KEYS[0])] == [401, 401, answer]
    assert sum(getattr(r, "path", "").startswith("/v1/continuum/") for r in served.router.routes) == 2


def test_a_client_cannot_say_itself_whose_it_is() -> None:
    forged = {"vllm_xargs": {OWNER_FIELD: "somebody"}, OWNER_FIELD: "somebody"}
    assert post(app(KEYS), "/v1/completions", KEYS[0], **forged)[OWNER_FIELD] != "somebody"
    assert post(app([]), "/v1/completions", None, **forged) == {}


@pytest.mark.parametrize("key", ["Bearer key-of-ann", ""])
def test_a_request_that_skips_vllms_request_classes_is_its_keys_too(key: str) -> None:
    """Token-in requests and beams, which share one set of parameters."""

    class Engine:
        async def add_request(self, _request_id: str, _prompt: Any, params: Any) -> Any:
            return params.extra_args

    async def sent() -> Any:
        if key:
            api_keys.owner.set(api_keys.owner_of(key, KEYS))
        params = SamplingParams(extra_args={OWNER_FIELD: "forged", "job_id": "j"})
        return [await Engine().add_request("1", {}, params) for _ in range(2)]

    request_fields.add_owner(Engine)
    owner = {OWNER_FIELD: api_keys.owner_of(key, KEYS)} if key else {}
    assert asyncio.run(sent()) == [{"job_id": "j", **owner}] * 2


def test_every_request_of_an_api_server_gets_its_owner() -> None:
    request_fields.install()
    assert getattr(AsyncLLM.add_request, wrapping.MARK)


def test_without_api_keys_a_request_is_nobodys_whatever_it_sends() -> None:
    assert post(app([]), "/v1/completions", "some-key", job_id="j") == {"job_id": "j"}


def test_the_processes_of_one_server_share_the_secret_and_those_of_another_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(api_keys.SECRET, raising=False)
    api_keys.share_secret()
    first = api_keys.secret()
    api_keys.share_secret()  # a front-end that was started with this environment
    assert api_keys.secret() == first
    monkeypatch.delenv(api_keys.SECRET)
    api_keys.share_secret()
    assert api_keys.secret() != first


def test_a_key_is_the_same_tenant_after_a_restart_and_its_hash_is_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A file of durations has the hash: of a fast one a weak key could be found by trying."""
    owners = set()
    for _ in range(2):
        monkeypatch.setenv(api_keys.SECRET, secrets.token_hex(32))
        api_keys.slow_hash.cache_clear()
        began_s = time.process_time()
        owners.add(api_keys.owner_of("Bearer key-of-ann", KEYS))
        assert time.process_time() - began_s > 0.005
    assert len(owners) == 1 and {len(owner) for owner in owners} == {32}


def test_a_client_makes_no_tenants_up_where_vllm_asks_for_no_key() -> None:
    """vLLM guards some paths only; keys that it does not know are hashed for nobody."""
    served = app(KEYS)

    @served.post("/invocations")
    async def invocations(request: CompletionRequest) -> dict[str, Any]:
        return to_engine(request)

    headers = [
        {"authorization": said} for said in ("Bearer made-up", "Bearer another", "Basic key-of-ann", "")
    ]
    body = {"model": "m", **BODIES["/v1/completions"]}
    sent = [send(served, "/invocations", said, body)["extra_args"] for said in (*headers, {})]
    assert sent == [{OWNER_FIELD: api_keys.NO_KEY}] * 5
    known = send(served, "/invocations", {"authorization": "bearer key-of-ann"}, body)["extra_args"]
    assert known == {OWNER_FIELD: api_keys.owner_of("Bearer key-of-ann", KEYS)}


def test_the_end_that_another_key_claims_frees_nothing(bench: Bench) -> None:
    ann, bob = ({OWNER_FIELD: name} for name in ("a" * 32, "b" * 32))
    first = bench.turn("job", prompt(64), **ann)
    arrival_s = next(iter(bench.engine.programs.records.values())).arrival_s
    pinned = dict(bench.engine.pins.pinned)
    bench.now_s += 1
    bench.turn("job", prompt(40, 9), is_last_step=True, **bob)
    assert bench.engine.pins.pinned == pinned and pinned
    bench.now_s += 1
    theirs = bench.send("job", prompt(40, 9), out=3, **bob)
    assert bench.engine.turns[theirs].program.arrival_s > arrival_s, "nor is its place theirs"
    bench.turn("job", [*first, 5], is_last_step=True, **ann)
    assert pinned.keys().isdisjoint(bench.engine.pins.pinned), "its own key's word is taken"


def test_a_prompt_that_goes_on_where_another_keys_turn_ended_is_not_linked_to_it(bench: Bench) -> None:
    ann, bob = ({OWNER_FIELD: name} for name in ("a" * 32, "b" * 32))
    first = bench.turn(None, prompt(64), out=2, **ann)
    bench.turn(None, [*first, 5, 6], out=2, **bob)
    assert not bench.engine.programs.records
    bench.turn(None, [*first, 5, 6], out=2, **ann)
    assert len(bench.engine.programs.records) == 1


def test_a_tenants_share_is_that_of_its_key(make: Any) -> None:
    bench = make(40, max_tenant_share=0.5)
    for i in range(12):
        bench.turn(f"greedy-{i}", prompt(64, i), **{OWNER_FIELD: "a" * 32})
    assert bench.engine.pins.refused["tenant"] > 0
    bench.turn("other", prompt(64, 99), **{OWNER_FIELD: "b" * 32})
    assert any(pin.program.startswith("other") for pin in bench.engine.pins.pinned.values())
