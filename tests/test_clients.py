"""Requests of known agents are linked to the right programs (docs/clients.md)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from bench import BLOCK, Bench
from client_requests import CHILD, CLIENTS, ENDS, PARENT, Client, Turn, codex
from entry_points import BODIES, app, ask, post, send

from continuum_lmcache.errors import RequestError
from continuum_lmcache.programs.identity import FIELDS, HINT_FIELD, MAX_CHARS, TOOLS_FIELD, UNUSED_FIELD
from continuum_lmcache.programs.session_fields import LABELS
from continuum_lmcache.types import PinEnd

NAMED = [name for name, client in CLIENTS.items() if not client.hints]
HINTING = [name for name, client in CLIENTS.items() if client.hints]
EVERY = pytest.mark.parametrize("client", CLIENTS.values(), ids=CLIENTS)


@pytest.fixture
def bench(make: Any) -> Bench:
    return make(60, policy="static-ttl")


def sent(turn: Turn) -> dict[str, Any]:
    """The API server's fields about the turn's program."""
    return dict(send(app([]), turn.path, turn.headers, turn.body)["extra_args"])


def tokens(turn: Turn) -> list[int]:
    """The turn's texts, a token a character; of a client that sends nonces, without them."""
    body = turn.body
    texts = [body.get("instructions"), body.get("system"), body.get("messages"), body.get("input")]
    spoken = [text for part in texts for text in spoken_in(part) if "billing" not in text]
    return [100 + ord(character) for character in "".join(spoken)]


def spoken_in(part: Any) -> list[str]:
    if isinstance(part, str):
        return [part]
    if isinstance(part, list):
        return [text for item in part for text in spoken_in(item)]
    return spoken_in(part.get("text", part.get("content"))) if isinstance(part, dict) else []


def names_of(client: Client) -> dict[str, set[Any]]:
    """Programs' names by agent."""
    found: dict[str, set[Any]] = {}
    for turn in client.turns:
        found.setdefault(turn.agent, set()).add(sent(turn).get("job_id"))
    return found


# which program a turn belongs to ---------------------------------------------


@pytest.mark.parametrize("name", NAMED)
def test_all_turns_of_an_agent_are_one_program_and_a_subagents_are_another(name: str) -> None:
    names = names_of(CLIENTS[name])
    assert all(len(found) == 1 and None not in found for found in names.values()), names
    assert names.get(CHILD) != names[PARENT]


@pytest.mark.parametrize("name", HINTING)
def test_a_name_that_subagents_share_is_a_hint_and_names_no_program(name: str) -> None:
    for turn in CLIENTS[name].turns:
        assert "job_id" not in sent(turn) and sent(turn)[HINT_FIELD]


@pytest.mark.parametrize("name", sorted(ENDS))
def test_a_client_that_knows_its_last_request_says_so_there_and_nowhere_else(name: str) -> None:
    said = [sent(turn).get("is_last_step", False) for turn in CLIENTS[name].turns]
    assert said == [False, False, False, True, False]


def test_a_stored_response_goes_on_in_the_program_that_it_ended() -> None:
    first = codex(PARENT, 1)
    answered = send(app([]), first.path, first.headers, first.body)
    body = {"model": "m", "input": "go on", "previous_response_id": answered["id"]}
    second = send(app([]), "/v1/responses", {}, body)
    assert second["extra_args"]["job_id"] == answered["extra_args"]["job_id"]
    third = send(app([]), "/v1/responses", {}, body | {"previous_response_id": second["id"]})
    assert third["extra_args"]["job_id"] == answered["extra_args"]["job_id"]
    unknown = send(app([]), "/v1/responses", {}, body | {"previous_response_id": "resp_elsewhere"})
    fourth = send(app([]), "/v1/responses", {}, body | {"previous_response_id": unknown["id"]})
    assert unknown["extra_args"] == fourth["extra_args"] == {"job_id": "resp_elsewhere"}


# effects of the identity -----------------------------------------------------


@EVERY
def test_a_parents_pin_outlives_its_subagents_traffic_and_is_reused(bench: Bench, client: Client) -> None:
    """The subagent computes more than the cache holds beside the pin."""
    for number, turn in enumerate(client.turns):
        said, before = sent(turn), bench.parts.residency.prompt_tokens["gpu"]
        big = list(range(1000, 1000 + 25 * BLOCK)) if turn.agent == CHILD else []
        bench.turn(said.pop("job_id", None), big + tokens(turn), 2, **said)
        if number == 2:
            bench.turn(None, list(range(2000, 2000 + 30 * BLOCK)))
        bench.now_s += 0.5
    found = bench.parts.residency.prompt_tokens["gpu"] - before
    assert found == len(tokens(client.turns[1])) // BLOCK * BLOCK, "all of the parent's turn before"
    outcomes = bench.engine.pins.outcomes
    assert outcomes[PinEnd.REUSED] >= 1 and outcomes[PinEnd.DIVERGED] == outcomes[PinEnd.EXPIRED] == 0


def test_under_one_name_a_subagent_leaves_its_parent_its_pin(bench: Bench) -> None:
    """Older versions of the client send no agents' ids: the prompts tell."""
    for turn in CLIENTS["Claude Code"].turns:
        session = Turn(turn.agent, turn.path, {**turn.headers, "x-claude-code-agent-id": ""}, turn.body)
        bench.turn(sent(session)["job_id"], tokens(turn))
    outcomes = bench.engine.pins.outcomes
    assert outcomes[PinEnd.DIVERGED] == 0 and outcomes[PinEnd.REUSED] >= 1


def test_a_hint_settles_which_of_two_equal_first_prompts_goes_on(bench: Bench) -> None:
    prompt = tokens(codex(PARENT, 1))
    for key in ("a", "b"):
        bench.turn(None, prompt, 2, **{HINT_FIELD: key})
    bench.turn(None, [*prompt, *range(3000, 3040)], 2)
    assert not bench.engine.programs.records, "without a hint nobody knows whose it is"
    bench.turn(None, [*prompt, *range(3100, 3140)], 2, **{HINT_FIELD: "b"})
    assert list(bench.engine.programs.records) == ["~None-2"]


def test_a_hint_does_not_link_a_prompt_that_goes_elsewhere(bench: Bench) -> None:
    """Several sessions may share a key: term-llm and pi have done so."""
    head = list(range(500, 660))
    for story in range(4):
        bench.turn(None, [*head, *[story] * 40], 2, **{HINT_FIELD: "one key for all"})
    assert not bench.engine.programs.records
    bench.turn(None, [*head, *[2] * 40, 7, 9, 9], 2, **{HINT_FIELD: "one key for all"})
    assert list(bench.engine.programs.records) == ["~None-3"]


CLOSING = [11, 12, 13, 14]  # a message's end, and what opens an answer


def agentx_prompt(session: int, turn: int) -> list[int]:
    """AgentX's harness: the last message ends with a text that the next prompt has not."""
    told = list(range(500 + 100 * session, 600 + 100 * session))
    for number in range(1, turn):
        told += [*CLOSING, *[7] * 8, *range(1000 + 40 * number, 1030 + 40 * number)]
    return [*told, *range(3000 - 50 * turn, 3020 - 50 * turn), *CLOSING]


@pytest.mark.parametrize("header", ["X-Correlation-ID", "none, as behind the Rust server"])
def test_every_later_turn_of_agentx_is_its_sessions(bench: Bench, header: str) -> None:
    bench.turn(None, [*range(2000, 2060), *CLOSING], 2)  # of another client: how a prompt is closed
    for turn in range(1, 5):
        for session in range(3):
            hint = {HINT_FIELD: f"c-{session}"} if header == "X-Correlation-ID" else {}
            bench.turn(None, agentx_prompt(session, turn), 2, **hint)
            bench.now_s += 0.5
    programs = bench.engine.programs.records
    assert sorted(programs) == ["~None-2", "~None-3", "~None-4"], "each has its first turn's name"
    assert [program.turns for program in programs.values()] == [4, 4, 4]


def test_hints_without_end_fill_no_table(bench: Bench) -> None:
    bench.engine.linker._hinted.most = 20
    for i in range(100):
        bench.turn(None, [*range(i, i + 40)], 2, **{HINT_FIELD: f"key {i}"})
    assert len(bench.engine.linker._hinted) <= 20


# unchanged requests ----------------------------------------------------------


@EVERY
def test_nothing_else_of_a_request_changes_and_nothing_but_names_is_added(client: Client) -> None:
    for turn in client.turns:
        with_names = send(app([]), turn.path, turn.headers, turn.body)
        names = {"agent_hint", "conversation", "prompt_cache_key", "metadata", "vllm_xargs", "program_id"}
        plain_body = {field: value for field, value in turn.body.items() if field not in names}
        plain = send(app([]), turn.path, {"authorization": turn.headers["authorization"]}, plain_body)
        assert plain["extra_args"].keys() <= {TOOLS_FIELD}
        assert (with_names["params"], with_names["messages"]) == (plain["params"], plain["messages"])
        added = with_names["extra_args"].keys() - turn.body.get("vllm_xargs", {}).keys()
        assert added <= {"job_id", "is_last_step", HINT_FIELD, TOOLS_FIELD}
        assert "sk-not-for-the-engine" not in json.dumps(with_names["extra_args"])


def test_a_client_cannot_set_the_fields_that_are_the_servers_own() -> None:
    forged = {HINT_FIELD: "stolen", UNUSED_FIELD: ["job_id"]}
    body = {"model": "m", "prompt": "hi", "vllm_xargs": {HINT_FIELD: "stolen"}, **forged}
    assert send(app([]), "/v1/completions", {}, body)["extra_args"] == {}


@pytest.mark.parametrize("tools", [5, "bash", ["bash"], [{"function": 5}], {"a": 1}], ids=str)
def test_tools_where_the_endpoint_has_no_such_field_are_ignored_as_vllm_does(tools: Any) -> None:
    body = {"model": "m", "prompt": "hi", "tools": tools}
    assert send(app([]), "/v1/completions", {}, body)["extra_args"] == {}


# bad values ------------------------------------------------------------------

LONG = "x" * (MAX_CHARS + 1)
BAD_HEADERS = {  # header, value, the counter's label
    "a session's id that is too long": ({"x-claude-code-session-id": LONG}, "x-claude-code-session-id"),
    "an agent's id that is too long": (
        {"x-claude-code-session-id": "s", "x-claude-code-agent-id": LONG},
        "x-claude-code-session-id",
    ),
    "both together too long": (
        {"x-claude-code-session-id": LONG[:200], "x-claude-code-agent-id": LONG[:200]},
        "x-claude-code-session-id",
    ),
    "a control character": ({"thread-id": "a\tb"}, "thread-id"),
    "a session's end that is no flag": ({"x-dynamo-session-final": "perhaps"}, "x-dynamo-session-final"),
}
BAD_FIELDS = {
    "no JSON": ({"vllm_xargs": {"agentic_context": "{"}}, "agentic_context"),
    "too much JSON": ({"vllm_xargs": {"agentic_context": f'{{"a": "{"x" * 20_000}"}}'}}, "agentic_context"),
    "deep JSON": ({"vllm_xargs": {"agentic_context": "[" * 9_000}}, "agentic_context"),
    "a number for an object": ({"vllm_xargs": {"agentic_context": 7}}, "agentic_context"),
    "a list for a name": ({"vllm_xargs": {"agentic_context": '{"program_id": ["a"]}'}}, "agentic_context"),
    "text for a flag": ({"agent_hint": {"session_id": "s", "expected_resume": "maybe"}}, "agent_hint"),
    "a control character": ({"prompt_cache_key": "a\x00b"}, "prompt_cache_key"),
    "a lone surrogate": ({"prompt_cache_key": "a\ud800"}, "prompt_cache_key"),
    "a lone surrogate in JSON": ({"agent_hint": '{"session_id": "\\udfff"}'}, "agent_hint"),
    "a key that is too long": ({"prompt_cache_key": LONG}, "prompt_cache_key"),
    "an object for a key": ({"prompt_cache_key": {"a": 1}}, "prompt_cache_key"),
    "text for metadata": ({"metadata": "user"}, "metadata"),
    "a session of nothing": ({"metadata": {"user_id": '{"session_id": ""}'}}, "metadata"),
    "a list for a conversation": ({"conversation": ["c"]}, "conversation"),
}


def without(headers: dict[str, str], fields: dict[str, Any]) -> dict[str, Any]:
    body = {"model": "m", "prompt": "hi", **fields}
    found: dict[str, Any] = send(app([]), "/v1/completions", headers, body)["extra_args"]
    return {field: value for field, value in found.items() if field not in fields.get("vllm_xargs", {})}


@pytest.mark.parametrize(("headers", "label"), BAD_HEADERS.values(), ids=BAD_HEADERS)
def test_a_bad_header_is_passed_over_and_counted_and_the_request_served(
    bench: Bench, headers: dict[str, str], label: str
) -> None:
    found = without(headers, {})
    assert found == {UNUSED_FIELD: [label]} and label in LABELS
    bench.turn(None, list(range(40)), **found)
    assert bench.parts.ignored == {label: 1}


@pytest.mark.parametrize(("fields", "label"), BAD_FIELDS.values(), ids=BAD_FIELDS)
def test_a_bad_field_of_another_convention_is_too(fields: dict[str, Any], label: str) -> None:
    found = without({}, fields)
    assert found.pop(UNUSED_FIELD) == [label]
    assert found in ({}, {"job_id": "s"}), "what beside it is good still counts"


def test_the_next_place_is_asked_where_one_is_bad_but_a_subagent_is_never_taken_for_its_parent() -> None:
    headers = {"x-claude-code-session-id": "s", "x-claude-code-agent-id": LONG, "x-session-id": "generic"}
    assert without(headers, {})["job_id"] == "generic"
    body = {"prompt_cache_key": "k"}
    assert without({"x-claude-code-session-id": LONG}, body)[HINT_FIELD] == "k"


@pytest.mark.parametrize("field", ["job_id", "this_func_call"])
def test_a_control_character_in_a_field_of_ours_is_a_clients_mistake(field: str) -> None:
    with pytest.raises(RequestError, match=f"{field} has a control character"):
        send(app([]), "/v1/completions", {}, {"model": "m", "prompt": "hi", field: "a\nb"})


def test_the_own_fields_win_over_every_convention_and_a_body_over_headers() -> None:
    headers = {"x-claude-code-session-id": "h", "thread-id": "t", "x-session-id": "x"}
    headers["x-dynamo-session-id"] = "d"
    context = {"vllm_xargs": {"agentic_context": '{"program_id": "p"}'}}
    assert without(headers, {"job_id": "j", **context})["job_id"] == "j"
    assert without(headers, context)["job_id"] == "p"
    assert without(headers, {"session_id": "s"})["job_id"] == "s"
    order = ["d", "h", "t", "x"]
    for header in ("x-dynamo-session-id", "x-claude-code-session-id", "thread-id", "x-session-id"):
        assert without(headers, {})["job_id"] == order.pop(0)
        del headers[header]
    assert set(FIELDS) & set(without({}, {})) == set()


@pytest.mark.parametrize("path", BODIES)
def test_on_every_endpoint_a_router_says_that_a_program_is_under_way(path: str) -> None:
    said = {"job_id": "p", "program_turns": 7, "program_age_s": 1.5}
    assert post(app([]), path, **said).items() >= said.items()
    in_xargs = post(app([]), path, vllm_xargs=said) if path != "/v1/messages" else said
    assert in_xargs.items() >= said.items()


@pytest.mark.parametrize("path", BODIES)
def test_on_every_endpoint_the_answer_says_the_programs_name(path: str) -> None:
    body = {"model": "m", **BODIES[path]}
    named = ask(app([]), path, {}, body | {"job_id": "run-42"}).headers
    assert named["x-session-id"] == "run-42"
    back = send(app([]), path, {"X-Session-ID": named["x-session-id"]}, body)["extra_args"]
    assert back["job_id"] == "run-42", "who sends it back goes on with the program"
    assert "x-session-id" not in ask(app([]), path, {}, body).headers, "this one named nothing"


@pytest.mark.parametrize("name", ["läuft", "\ud800", "x" * 257, "a\r\nset-cookie: b"])
def test_a_name_that_no_header_can_carry_is_not_answered(name: str) -> None:
    body = {"model": "m", "prompt": "hi", "job_id": name}
    headers = ask(app([]), "/v1/completions", {}, body, raises=False).headers
    assert not {"x-session-id", "set-cookie"} & set(headers)


@pytest.mark.parametrize("path", BODIES)
def test_an_extra_body_inside_a_plain_body_is_counted_and_its_names_are_not_read(
    path: str, bench: Bench
) -> None:
    nested = {"extra_body": {"job_id": "run-42"}}
    found = dict(send(app([]), path, {}, {"model": "m"} | BODIES[path] | nested)["extra_args"])
    found.pop(TOOLS_FIELD, None)
    assert found == {UNUSED_FIELD: ["extra_body"]}
    bench.turn(None, list(range(40)), **found)
    assert bench.parts.ignored == {"extra_body": 1}


@pytest.mark.parametrize("nested", [{"top_k": 5}, "job_id", None])
def test_an_extra_body_without_a_field_of_ours_is_not_our_matter(nested: Any) -> None:
    assert without({}, {"extra_body": nested}) == {}
