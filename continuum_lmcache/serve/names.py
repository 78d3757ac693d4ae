"""Finds a request's program for a router that sees no bodies.

Ray's proxy passes a request's headers to its router and leaves the body to the replica. Most clients name
their program in the body. So this middleware runs in the proxy, reads the body, and puts what the router
needs into one header. The header is Ray's session id, so Ray's own routers use it too. A client's
header of that name is dropped. A request without a program goes where the fewest requests are.

All connections share the proxy's event loop. So a body of more than MOST_BYTES stays unread, of a shorter one
only the few fields that may name a program become objects, and where the replicas require an API key, a
request without one is passed on unread: a replica answers it with HTTP 401.

Seam, read on Ray 2.60.0: RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names `middlewares`, which each proxy
calls once; RAY_SERVE_SESSION_ID_HEADER_KEY names the header. app.py sets both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar
from urllib.parse import parse_qs

import msgspec
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from continuum_lmcache.errors import RequestError
from continuum_lmcache.programs import identity
from continuum_lmcache.programs.session_fields import BODY_FIELDS, SentFields, program_values

HEADER = "x-continuum-turn"
ENVIRONMENT = {  # of Ray's proxies and controller
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "continuum_lmcache.serve.names:middlewares",
    "RAY_SERVE_SESSION_ID_HEADER_KEY": HEADER,
    "RAY_SERVE_DEPLOYMENT_ACTOR_HEALTH_CHECK_PERIOD_S": "1",  # a dead state is noticed; Ray's own: 10 s
}
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
MOST_BYTES = 4 << 20  # of a body that is read here: a million tokens of text
MOST_FIELD_BYTES = 1 << 16  # of a field that may name a program; a longer one names none
MESSAGES, ANSWERED = b'"messages"', b'"assistant"'  # within a text, JSON writes \" for "
CONTINUED = "previous_response_id"  # the answer's id: one replica stores the answer
BODY = msgspec.defstruct(
    "Body",
    [(field, msgspec.Raw, msgspec.Raw(b"null")) for field in (*BODY_FIELDS, "vllm_xargs", "cache_salt")],
)
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # msgspec refuses half a pair, as cut text may have it


@dataclass(frozen=True, slots=True)
class TurnName:
    """What the router knows of a request. Its text is a header's value."""

    program: str = ""  # identity.program_id, then the router's hash of it; "": it names none
    is_turn: bool = True  # False: /health, /v1/models, ...
    is_first: bool = False  # it carries no answer yet, as a new program's; False also where this is not seen
    is_last: bool = False
    stays: bool = False  # it continues an answer that its program's replica alone stores
    rank: int | None = None  # not a turn: a request to the replica of this rank
    turns: int = 0  # finished turns of the program; the router adds these three
    age_s: float = 0.0  # since its first turn arrived
    why: str = "unasked"  # RouteReason; without the state's answer its router chose the replica

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> TurnName:
        """The inverse of __str__; other text is a program's own name, as in X-Session-ID."""
        try:
            found = msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, RecursionError):
            return cls(program=text)
        is_ours = min(found.rank or 0, found.turns, found.age_s) >= 0 and str(found) == text
        return found if is_ours else cls(program=text)


NO_TURN = TurnName(is_turn=False)


def turn_name(body: bytes, headers: Mapping[str, str]) -> TurnName:
    """The name in body and headers (names in lower case). Bad fields name nothing: vLLM refuses them."""
    try:
        fields = fields_of(body)
        xargs = fields.get("vllm_xargs")
        values = program_values(SentFields(fields, xargs if isinstance(xargs, dict) else {}, headers))
        job = identity.name("job_id", values.get("job_id"))
        is_last = identity.flag("is_last_step", values.get("is_last_step"))
    except (msgspec.DecodeError, ValueError, RecursionError, RequestError):
        job = None
    if job is None:
        return TurnName()
    continued, salt = fields.get(CONTINUED), fields.get("cache_salt")
    stays = continued is not None
    if job == continued:  # the replica that stores this answer has reported its id, which nobody can guess
        return TurnName(job, is_last=is_last, stays=True)
    sent = headers.get("authorization")  # credentials; vLLM checks them
    owner = identity.key_digest(sent).hex()[:32] if sent else ""
    namespace = identity.namespace_of(salt if isinstance(salt, str) else None, owner)
    is_first = MESSAGES in body and ANSWERED not in body
    return TurnName(identity.program_id(job, namespace), is_first=is_first, is_last=is_last, stays=stays)


def fields_of(body: bytes) -> dict[str, Any]:
    """The fields of a JSON object that may name its program. All others are passed over without an object.
    Raises msgspec.DecodeError, ValueError or RecursionError for other text."""
    try:
        found = msgspec.json.decode(body, type=BODY)
    except msgspec.DecodeError:
        found = msgspec.json.decode(SURROGATE.sub(rb"\\u00", body), type=BODY)
    raw = {field: bytes(getattr(found, field)) for field in found.__struct_fields__}
    return {
        field: json.loads(text)
        for field, text in raw.items()
        if text != b"null" and len(text) <= MOST_FIELD_BYTES
    }


class NameTurns:
    """ASGI middleware of Ray's proxy."""

    key_digests: ClassVar[frozenset[bytes]] = frozenset()  # of the replicas' API keys, set by the router

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        name = HEADER.encode()  # in which Ray takes _ for -, as proxies on the way may write it
        headers = [pair for pair in scope["headers"] if pair[0].lower().replace(b"_", b"-") != name]
        texts = {key.decode("latin-1").lower(): value.decode("latin-1").strip() for key, value in headers}
        turn = NO_TURN
        if scope["method"] == "POST" and scope["path"].endswith(ENDPOINTS):
            keys = self.key_digests
            if not keys or identity.accepted_key(texts.get("authorization", ""), keys) is not None:
                body, receive = await read_body(receive)
                turn = turn_name(body or b"{}", texts)
        elif (rank := requested_rank(scope)) is not None:
            turn = replace(NO_TURN, rank=rank)
        headers.append((name, str(turn).encode()))
        return await self._app({**scope, "headers": headers}, receive, send)


def requested_rank(scope: Scope) -> int | None:
    """The replica that a GET with `?replica=N` is for; None: any."""
    if scope["method"] != "GET":
        return None
    rank = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("replica", [""])[0]
    return int(rank) if rank.isdecimal() and len(rank) < 9 else None


async def read_body(receive: Receive) -> tuple[bytes | None, Receive]:
    """The whole body, and a receive that returns it again; None: too long, or its client left."""
    parts: list[Message] = []
    size = 0
    while not parts or (parts[-1].get("more_body", False) and size <= MOST_BYTES):
        parts.append(await receive())
        size += len(parts[-1].get("body", b""))
    is_whole = parts[-1]["type"] == "http.request" and size <= MOST_BYTES
    body = b"".join(part.get("body", b"") for part in parts) if is_whole else None

    async def receive_again() -> Message:
        return parts.pop(0) if parts else await receive()

    return body, receive_again


def middlewares() -> list[Middleware]:
    """The function that RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names."""
    return [Middleware(NameTurns)]
