"""Ray's proxy reads a request's program for its router, from the same fields as the engine."""

from __future__ import annotations

import asyncio
import json
import re
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from continuum_lmcache.programs.identity import key_digest, program_id
from continuum_lmcache.programs.session_fields import TABLE
from continuum_lmcache.serve.names import (
    ENVIRONMENT,
    HEADER,
    MOST_BYTES,
    NO_TURN,
    NameTurns,
    TurnName,
    middlewares,
    turn_name,
)
from continuum_lmcache.serve.settings import ServeSettings

ROOT = Path(__file__).resolve().parent.parent

POST = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""}


def through(
    body: bytes, headers: dict[str, str] | None = None, parts: int = 1, **scope: Any
) -> tuple[TurnName, bytes, dict[str, str]]:
    """A request that passes the middleware: the router's name of it, its body and its headers afterwards."""
    seen: dict[str, Any] = {}
    step = -(-len(body) // parts) or 1
    chunks = [body[i : i + step] for i in range(0, len(body), step)] or [b""]
    messages = [
        {"type": "http.request", "body": chunk, "more_body": i + 1 < len(chunks)}
        for i, chunk in enumerate(chunks)
    ]

    async def receive() -> dict[str, Any]:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def app(scope: Any, receive: Any, _send: Any) -> None:
        got = b""
        while (message := await receive())["type"] == "http.request":
            got += message["body"]
        seen.update(body=got, headers={k.decode(): v.decode("latin-1") for k, v in scope["headers"]})

    raw = [(k.encode(), v.encode("latin-1")) for k, v in (headers or {}).items()]
    asyncio.run(NameTurns(app)(POST | scope | {"headers": raw}, receive, None))  # type: ignore[arg-type]
    return TurnName.parse(seen["headers"].pop(HEADER)), seen["body"], seen["headers"]


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": "x"} | fields).encode()


def test_a_program_named_in_the_body_is_recognised_and_the_body_arrives_as_it_was_sent() -> None:
    sent = body(job_id="run-42", is_last_step=True)
    for parts in (1, 3):
        turn, got, _ = through(sent, parts=parts)
        assert turn == TurnName(program_id("run-42", ""), is_last=True) and got == sent


@pytest.mark.parametrize("field", sorted({p.field for p in TABLE["job_id"] if p.part == "headers"}))
def test_every_header_that_names_a_program_for_the_engine_names_it_for_the_router(field: str) -> None:
    turn, _, headers = through(body(), {field: "s-1"})
    assert turn.program == "s-1" and headers[field] == "s-1", "the engine still reads it"


def test_programs_of_two_keys_or_two_salts_are_two() -> None:
    names = [
        through(body(job_id="run"), {"authorization": "Bearer a"})[0].program,
        through(body(job_id="run"), {"authorization": "Bearer b"})[0].program,
        through(body(job_id="run", cache_salt="s"))[0].program,
        through(body(job_id="run"))[0].program,
    ]
    assert len(set(names)) == 4 and not any("Bearer" in name for name in names)


def test_what_a_client_sends_under_the_routers_header_is_dropped() -> None:
    lie = str(TurnName("victim", turns=99, age_s=1e6))
    for name in (HEADER, HEADER.upper(), HEADER.replace("-", "_")):
        turn, _, headers = through(body(job_id="own"), {name: lie})
        assert turn.program == "own" and turn.turns == 0 and lie not in headers.values()


@pytest.mark.parametrize(
    "sent", [b"", b"{", b"[1]", b"\xff", body(), body(job_id=[1]), body(job_id=""), b"[" * 100_000]
)
def test_a_body_that_names_no_program_passes_unread(sent: bytes) -> None:
    turn, got, _ = through(sent)
    assert turn == TurnName() and got == sent


@pytest.mark.parametrize("prompt", ["cut \ud83d", "\ud800 \\ud800", ["\udfff"]])
def test_text_that_was_cut_within_a_character_hides_no_name(prompt: object) -> None:
    assert through(body(prompt=prompt, job_id="run \N{CROSS MARK}"))[0].program == "run \N{CROSS MARK}"


def test_a_body_of_many_objects_is_passed_over_without_making_them() -> None:
    """All connections share the proxy's event loop."""
    start = b'{"model": "m", "job_id": "run", "prompt": ['
    sent = start + b"[]," * ((MOST_BYTES - len(start) - 10) // 3) + b"0]}"
    turn_name(sent, {})  # warm
    began_s = time.thread_time()
    assert turn_name(sent, {}).program == "run"
    ours_s = time.thread_time() - began_s
    began_s = time.thread_time()
    json.loads(sent)
    assert ours_s < (time.thread_time() - began_s) / 2
    deep = b'{"job_id": ' + b"[]," * MOST_BYTES
    assert turn_name(deep[:MOST_BYTES], {}) == TurnName()


def test_a_field_that_is_too_long_for_a_name_is_no_object() -> None:
    assert through(body(job_id=[[]] * 100_000))[0] == TurnName()


def test_without_the_replicas_api_key_a_request_is_no_turn_and_nothing_of_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(NameTurns, "key_digests", frozenset(map(key_digest, ("one", "two"))))
    sent = body(job_id="run")
    for wrong in (
        {},
        {"authorization": "Bearer three"},
        {"authorization": "Basic one"},
        {"authorization": "one"},
    ):
        turn, got, _ = through(sent, wrong)
        assert turn == NO_TURN and got == sent, "a replica answers it"
    for right in ("Bearer one", "bearer two"):
        assert through(sent, {"authorization": right})[0].program


def test_a_turn_that_continues_a_stored_answer_stays_with_its_replica() -> None:
    alone = through(body(previous_response_id="resp_1"), path="/v1/responses")[0]
    assert (alone.program, alone.stays) == ("resp_1", True)
    salted = through(body(previous_response_id="resp_1", cache_salt="s"), {"authorization": "Bearer k"})[0]
    assert salted == alone, "the replica that stores it knows its id alone"
    named = through(body(previous_response_id="resp_1", job_id="run"))[0]
    assert (named.program, named.stays) == ("run", True)


def test_a_conversation_without_an_answer_is_its_programs_first_turn() -> None:
    """JSON writes the quotes within a text as \\", so no text looks like a role."""
    asked = {"role": "user", "content": 'the "assistant" said {"role": "assistant"}'}
    answered = {"role": "assistant", "content": "yes"}

    def is_first(**fields: Any) -> bool:
        return through(body(job_id="run", **fields), path="/v1/chat/completions")[0].is_first

    assert is_first(messages=[asked])
    assert not is_first(messages=[asked, answered, asked])
    assert not is_first(), "a prompt of text may have answers"


def test_the_example_and_the_application_agree_on_the_proxies_environment() -> None:
    page = yaml.safe_load((ROOT / "docs" / "ray.yaml").read_text())
    given = page["controller_options"]["runtime_env"]["env_vars"]
    assert given == ENVIRONMENT
    assert [each.cls for each in middlewares()] == [NameTurns]


def test_the_example_names_every_key_of_the_application_with_its_default() -> None:
    page = (ROOT / "docs" / "ray.yaml").read_text()
    args = yaml.safe_load(page)["applications"][0]["args"]
    defaults = re.findall(r"^ {6}# (\w+: \S+)", page, re.MULTILINE)
    left_out = yaml.safe_load("\n".join(defaults))
    assert args.keys() | left_out.keys() == {each.name for each in fields(ServeSettings)}
    assert all(getattr(ServeSettings("m"), name) == value for name, value in left_out.items())


def test_a_body_that_is_too_long_passes_unnamed_and_whole() -> None:
    sent = body(job_id="run", prompt="x" * MOST_BYTES)
    turn, got, _ = through(sent, parts=4)
    assert turn == TurnName() and got == sent
    assert through(sent, {"x-session-id": "s-1"}, parts=4)[0].program == "s-1"


def test_a_question_may_be_for_one_replica() -> None:
    asked = {"method": "GET", "path": "/metrics"}
    assert through(b"", query_string=b"replica=1", **asked)[0] == TurnName(is_turn=False, rank=1)
    for query in (b"", b"replica=x", b"replica=-1", b"replica=99999999999"):
        assert through(b"", query_string=query, **asked)[0] == NO_TURN


@given(
    st.builds(
        TurnName,
        st.text(max_size=300),
        st.booleans(),
        st.booleans(),
        st.booleans(),
        st.booleans(),
        st.none() | st.integers(0, 99),
        st.integers(0, 1 << 20),
        st.integers(0, 10**7).map(lambda ms: ms / 1000),
    )
)
def test_what_is_written_into_the_header_is_read_again(turn: TurnName) -> None:
    text = str(turn)
    assert text.isascii() and TurnName.parse(text) == turn


@given(st.text(min_size=1, max_size=50))
def test_a_session_that_ray_read_itself_is_a_programs_name(text: str) -> None:
    turn = TurnName.parse(text)
    assert turn == TurnName(program=text) or str(turn) == text


@pytest.mark.parametrize("field", [{"program": ["victim"]}, {"turns": -1}, {"rank": "0"}, {"age_s": "1"}])
def test_a_name_of_another_type_or_below_zero_is_no_header_of_ours(field: dict[str, Any]) -> None:
    text = json.dumps(asdict(TurnName("p")) | field)
    assert TurnName.parse(text) == TurnName(program=text)
