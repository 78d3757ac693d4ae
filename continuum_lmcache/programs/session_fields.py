"""The fields in which clients name their program: one table, read from the top.

docs/clients.md lists who sends which field, and since when. A new client needs a FieldPlace here, an entry in
tests/client_requests.py and a row there. A field that names one agent comes before one that may name a whole
session. A name that several programs may share is a hint: it counts only if the prompt continues one of the
hint's turns (programs/prompt_linker.py).

A bad value of our own fields is refused (RequestError). A bad value in another convention's field is skipped
and counted, and the next field is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from continuum_lmcache.errors import RequestError
from continuum_lmcache.programs.identity import FIELDS, HINT_FIELD, UNUSED_FIELD, flag, name, parse

MAX_JSON_CHARS = 16_384
NESTED = "extra_body"  # an SDK's argument, whose fields the SDK puts into the body; in a body it is a mistake
SESSION_MARK = "_session_"  # Claude Code before 2.1.78: user_<hash>_account_<id>_session_<id>


@dataclass(frozen=True, slots=True)
class SentFields:
    """The parts of a request that may name its program. Header names are in lower case."""

    body: Mapping[str, object]
    xargs: Mapping[str, object]  # vllm_xargs
    headers: Mapping[str, object]


Reader = Callable[[str, object], object]
"""From a field's name and value to the program's name; None: it names none. Raises RequestError."""


def conversation(field: str, value: object) -> object:
    return name(field, value.get("id") if isinstance(value, Mapping) else value)


def session_part(field: str, value: object) -> object:
    """The session in Claude Code's user id: JSON with a session_id, or text with a mark; else None."""
    text = name(field, value) if not isinstance(value, str) else value
    if text is not None and text.lstrip().startswith("{"):
        return name(field, inner(field, text, "session_id"))
    _, mark, session = (text or "").partition(SESSION_MARK)
    return name(field, session) if mark else None


def negated(field: str, value: object) -> object:
    return not flag(field, value)


@dataclass(frozen=True, slots=True)
class FieldPlace:
    """One field of the table. "a.b" is the field b of a, an object or its JSON text."""

    part: str  # of SentFields
    field: str
    agent: str = ""  # a second field there, which distinguishes the agents of one session
    read: Reader = name
    ours: bool = False

    def value_in(self, sent: SentFields) -> object:
        """The value of this field; None: it names no program. Raises RequestError."""
        raw = self._raw(sent, self.field)
        value = None if raw is None else self.read(self.field, raw)
        agent = self._raw(sent, self.agent) if self.agent and value is not None else None
        return value if agent is None else name(self.agent, f"{value}:{name(self.agent, agent)}")

    @property
    def label(self) -> str:
        """The field's name in the counts."""
        return self.field.partition(".")[0]

    def _raw(self, sent: SentFields, field: str) -> object:
        outer, _, rest = field.partition(".")
        value = getattr(sent, self.part).get(outer)
        if rest and value is not None:
            value = inner(outer, value, rest)
        return None if value == "" and not self.ours else value


def inner(field: str, outer: object, key: str) -> object:
    """A field of an object that may be JSON text."""
    if isinstance(outer, str):
        try:
            outer = json.loads(outer) if len(outer) <= MAX_JSON_CHARS else None
        except (ValueError, RecursionError):
            outer = None
    if not isinstance(outer, Mapping):
        raise RequestError(f"{field} must be a JSON object of at most {MAX_JSON_CHARS} characters")
    return outer.get(key)


TABLE: dict[str, tuple[FieldPlace, ...]] = {
    "job_id": (
        FieldPlace("body", "job_id", ours=True),
        FieldPlace("xargs", "job_id", ours=True),
        FieldPlace("body", "program_id"),
        FieldPlace("xargs", "agentic_context.program_id"),
        FieldPlace("xargs", "agentic_context.session_id", agent="agentic_context.agent_id"),
        FieldPlace("xargs", "agent_hint.session_id"),
        FieldPlace("body", "agent_hint.session_id"),
        FieldPlace("body", "session_id"),
        FieldPlace("xargs", "session_id"),
        FieldPlace("headers", "x-dynamo-session-id"),
        FieldPlace("headers", "x-claude-code-session-id", agent="x-claude-code-agent-id"),
        FieldPlace("headers", "thread-id"),
        FieldPlace("headers", "thread_id"),
        FieldPlace("headers", "session-id"),
        FieldPlace("headers", "session_id"),
        FieldPlace("headers", "x-session-id"),
        FieldPlace("headers", "x-session-affinity"),
        FieldPlace("body", "conversation", read=conversation),
        FieldPlace("body", "previous_response_id"),  # the API server puts its program's name there
    ),
    "is_last_step": (
        FieldPlace("body", "is_last_step", read=flag, ours=True),
        FieldPlace("xargs", "is_last_step", read=flag, ours=True),
        FieldPlace("xargs", "agentic_context.expected_resume", read=negated),
        FieldPlace("xargs", "agent_hint.expected_resume", read=negated),
        FieldPlace("body", "agent_hint.expected_resume", read=negated),
        FieldPlace("headers", "x-dynamo-session-final", read=flag),
    ),
    HINT_FIELD: (
        FieldPlace("body", "prompt_cache_key"),
        FieldPlace("body", "metadata.user_id", read=session_part),
        FieldPlace("headers", "x-correlation-id"),  # gateways make one for each request
    ),
}
PLACES = [place for places in TABLE.values() for place in places]
LABELS = frozenset({NESTED, *(place.label for place in PLACES)})
BODY_FIELDS = frozenset({*FIELDS, NESTED, *(place.label for place in PLACES if place.part == "body")})
IN_HEADERS = [place for place in PLACES if place.part == "headers"]
HEADERS = frozenset({*(p.field for p in IN_HEADERS), *(p.agent for p in IN_HEADERS if p.agent)})


def program_values(sent: SentFields) -> dict[str, object]:
    """The request's values, by the names of FIELDS, HINT_FIELD and UNUSED_FIELD. Raises RequestError."""
    own = {field: sent.body[field] for field in FIELDS if sent.body.get(field) is not None}
    parse({**{field: sent.xargs.get(field) for field in FIELDS}, **own})
    found: dict[str, object] = {}
    unused: list[str] = []
    for what, places in TABLE.items():
        if what == HINT_FIELD and "job_id" in found:
            break
        value = first_value(places, sent, unused)
        if value is not None and value is not False:
            found[what] = value
    if isinstance(nested := sent.body.get(NESTED), Mapping) and nested.keys() & BODY_FIELDS:
        unused.append(NESTED)
    if unused:
        found[UNUSED_FIELD] = sorted(set(unused))
    return own | found


def first_value(places: tuple[FieldPlace, ...], sent: SentFields, unused: list[str]) -> object:
    """The value of the first field that has one; names of fields with bad values are added to `unused`."""
    for place in places:
        try:
            value = place.value_in(sent)
        except RequestError:
            if place.ours:
                raise
            unused.append(place.label)
            continue
        if value is not None:
            return value
    return None


def unused_fields(fields: Mapping[str, object]) -> list[str]:
    """The fields that the API server could not use, by `program_values`."""
    named = fields.get(UNUSED_FIELD)
    if not isinstance(named, list):
        return []
    return [field for field in named if isinstance(field, str) and field in LABELS]
