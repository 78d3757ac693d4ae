"""Ray's proxy reads a request's program for its router, from the same fields as the engine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from continuum_lmcache.console import fleet
from continuum_lmcache.programs.identity import program_id
from continuum_lmcache.programs.session_fields import TABLE
from continuum_lmcache.serve.names import (
    ENVIRONMENT,
    HEADER,
    MOST_BYTES,
    NameTurns,
    TurnName,
    middlewares,
    turn_name,
)

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
        assert turn == TurnName(program_id("run-42", ""), len(sent), is_last=True) and got == sent


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
    lie = str(TurnName("victim", 10, turns=99, age_s=1e6))
    for name in (HEADER, HEADER.upper(), HEADER.replace("-", "_")):
        turn, _, headers = through(body(job_id="own"), {name: lie})
        assert turn.program == "own" and turn.turns == 0 and lie not in headers.values()


@pytest.mark.parametrize(
    "sent", [b"", b"{", b"[1]", b"\xff", body(), body(job_id=[1]), body(job_id=""), b"[" * 100_000]
)
def test_a_body_that_names_no_program_passes_unread(sent: bytes) -> None:
    turn, got, _ = through(sent)
    assert turn.program == "" and got == sent


def test_the_doctor_the_example_and_the_application_agree_on_the_proxies_environment() -> None:
    page = yaml.safe_load((ROOT / "docs" / "ray.yaml").read_text())
    given = page["controller_options"]["runtime_env"]["env_vars"]
    assert given == ENVIRONMENT == fleet.ENVIRONMENT
    assert [each.cls for each in middlewares()] == [NameTurns]


def test_a_body_that_is_too_long_passes_unnamed_and_whole() -> None:
    sent = body(job_id="run", prompt="x" * MOST_BYTES)
    turn, got, _ = through(sent, parts=4)
    assert turn.program == "" and got == sent


def test_a_question_may_be_for_one_replica() -> None:
    asked = {"method": "GET", "path": "/metrics"}
    assert through(b"", query_string=b"replica=1", **asked)[0] == TurnName(rank=1)
    for query in (b"", b"replica=x", b"replica=-1", b"replica=99999999999"):
        assert through(b"", query_string=query, **asked)[0] == TurnName()


@given(
    st.builds(
        TurnName,
        st.text(max_size=300),
        st.integers(0, 1 << 40),
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


def test_a_name_with_a_lone_surrogate_is_no_name_here_and_the_engine_refuses_it() -> None:
    assert turn_name(b'{"job_id": "\\ud800"}', {}).program == ""
