"""A request's fields about its program."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from continuum_lmcache.errors import RequestError
from continuum_lmcache.programs.identity import FIELDS, MAX_CHARS, ProgramFields, hidden, parse

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),  # with surrogates
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
SERVER_KEY = b"of this server"


def test_a_program_is_named_by_text_or_number_and_null_is_nobody() -> None:
    assert parse({"job_id": "run-1"}).job_id == "run-1"
    assert parse({"job_id": 42}).job_id == "42"
    assert parse({"job_id": None}) == parse({}) == ProgramFields()


def test_a_router_says_for_how_many_turns_and_seconds_a_program_is_under_way() -> None:
    says = parse({"job_id": "p", "program_turns": 7, "program_age_s": 61.5})
    assert (says.turns, says.age_s) == (7, 61.5)
    assert parse({"program_turns": None}).turns == 0


@pytest.mark.parametrize("value", [True, 1, "true", "True", "1", " yes "])
def test_the_last_step_may_be_marked_in_json_or_as_text(value: object) -> None:
    assert parse({"is_last_step": value}).is_last_step


@pytest.mark.parametrize("value", [False, None, 0, "false", "0", "no", ""])
def test_and_so_may_its_absence(value: object) -> None:
    assert not parse({"is_last_step": value}).is_last_step


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"job_id": ""}, f"job_id has 0 characters; it must have 1 to {MAX_CHARS}"),
        ({"job_id": "x" * 10**6}, "job_id has 1000000 characters"),
        ({"job_id": {"a": 1}}, "job_id must be text, not an object"),
        ({"job_id": True}, "job_id must be text, not true or false"),
        ({"job_id": "a\nb"}, "job_id has a control character"),
        ({"job_id": "a\ud800"}, "job_id has a control character or a lone surrogate"),
        ({"this_func_call": "\udfff"}, "this_func_call has a control character or a lone surrogate"),
        ({"job_id": 10**5000}, "job_id is a number of more than 18 digits"),
        ({"is_last_step": "maybe"}, "is_last_step is 'maybe'; it must be true or false"),
        ({"is_last_step": [1]}, "is_last_step is .1.; it must be true or false"),
        ({"this_func_call": {}}, "this_func_call must be text, not an object"),
        ({"program_turns": "7"}, "program_turns must be a number, not text"),
        ({"program_turns": True}, "program_turns must be a number, not true or false"),
        ({"program_turns": -1}, "program_turns must be a whole number from 0 to 10000"),
        ({"program_turns": 2.5}, "program_turns must be a whole number from 0 to 10000"),
        ({"program_turns": 10**400}, "program_turns must be a whole number from 0 to 10000"),
        ({"program_age_s": 86_401}, "program_age_s must be a number from 0 to 86400"),
        ({"program_age_s": float("nan")}, "program_age_s must be a number from 0 to 86400"),
    ],
)
def test_a_bad_field_is_refused_in_one_sentence(fields: dict[str, object], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        parse(fields)


@given(st.dictionaries(st.sampled_from(FIELDS), JSON))
def test_whatever_json_brings_it_is_an_identity_or_a_request_error(fields: dict[str, object]) -> None:
    try:
        identity = parse(fields)
    except RequestError as error:
        assert len(str(error)) < 300
    else:
        assert identity.job_id is None or 1 <= len(identity.job_id) <= MAX_CHARS
        (identity.job_id or "").encode()  # as in every message to the engine


def test_the_hash_spreads_programs_evenly_and_cannot_be_predicted_without_the_key() -> None:
    names = [f"run-{i}" for i in range(4000)]
    ours, others = ([int(hidden(name, key), 16) % 4 for name in names] for key in (SERVER_KEY, b"another"))
    counts = Counter(ours)
    assert set(counts) == {0, 1, 2, 3}
    assert max(counts.values()) < 1.15 * min(counts.values())
    agree = sum(a == b for a, b in zip(ours, others, strict=True)) / len(names)
    assert 0.2 < agree < 0.3


@given(st.text())
def test_any_name_has_a_hash_and_always_the_same(name: str) -> None:
    found = hidden(name, SERVER_KEY)
    assert len(found) == 32 and found == hidden(name, SERVER_KEY)
