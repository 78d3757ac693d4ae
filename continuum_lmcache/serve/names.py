"""Finds a request's program for a router that sees no bodies.

Ray's proxy passes a request's headers to its router and leaves the body to the replica. Most clients name
their program in the body. So this middleware runs in the proxy, reads the body, and puts what the router
needs into one header. The header is Ray's session id, so Ray's own routers use it too. A client's
header of that name is dropped. A request without a program goes where the fewest requests are.

Seam, read on Ray 2.60.0: RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names `middlewares`, which each proxy
calls once; RAY_SERVE_SESSION_ID_HEADER_KEY names the header. app.py sets both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any
from urllib.parse import parse_qs, quote, unquote

from starlette.middleware import Middleware

from continuum_lmcache.errors import RequestError
from continuum_lmcache.programs.identity import flag, name, program_id, tenant_of
from continuum_lmcache.programs.session_fields import SentFields, program_values

HEADER = "x-continuum-turn"
ENVIRONMENT = {  # of Ray's proxies
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "continuum_lmcache.serve.names:middlewares",
    "RAY_SERVE_SESSION_ID_HEADER_KEY": HEADER,
}
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
MOST_BYTES = 32 << 20  # of a body that is read here; a longer one stays unnamed
HEADER_TEXT = re.compile(r"([^;]*);(\d+);([01]);(\d*);(\d+);(\d+\.\d+)")
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Any, Receive, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class TurnName:
    """What the router knows of a request. Its text is a header's value."""

    program: str = ""  # identity.program_id of its tenant, then the router's hash of it; "": it names none
    body_bytes: int = 0  # of its body; 0: not known
    is_last: bool = False
    rank: int | None = None  # not a turn: a request to the replica of this rank
    turns: int = 0  # finished turns of the program; the router adds these two
    age_s: float = 0.0  # since its first turn arrived

    def __str__(self) -> str:
        rank = "" if self.rank is None else str(self.rank)
        name = quote(self.program, safe="")
        return f"{name};{self.body_bytes};{int(self.is_last)};{rank};{self.turns};{self.age_s:.3f}"

    @classmethod
    def parse(cls, text: str) -> TurnName:
        """The inverse of __str__; other text is a program's own name, as in X-Session-ID."""
        if (written := HEADER_TEXT.fullmatch(text)) is None:
            return cls(program=text)
        name, body_bytes, last, rank, turns, age_s = written.groups()
        program = unquote(name)
        rank_number = int(rank) if rank else None
        return cls(program, int(body_bytes), last == "1", rank_number, int(turns), float(age_s))


def turn_name(body: bytes, headers: Mapping[str, str]) -> TurnName:
    """The name in body and headers (names in lower case). Bad fields name nothing: vLLM refuses them."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return TurnName()
    if not isinstance(fields, dict):
        return TurnName()
    xargs = fields.get("vllm_xargs")
    try:
        values = program_values(SentFields(fields, xargs if isinstance(xargs, dict) else {}, headers))
        job = name("job_id", values.get("job_id"))
        is_last = flag("is_last_step", values.get("is_last_step"))
    except RequestError:
        return TurnName(body_bytes=len(body))
    if job is None:
        return TurnName(body_bytes=len(body))
    salt = fields.get("cache_salt")
    tenant = tenant_of(salt if isinstance(salt, str) else None, owner_of(headers.get("authorization", "")))
    return TurnName(program_id(job, tenant), len(body), is_last)


def owner_of(authorization: str) -> str:
    """A hash of the credentials, 32 characters; "": none were sent. vLLM checks the permissions.

    It has no key, since proxies share none. The request carries it beside the credentials themselves. The
    state and the replicas keep the router's keyed hash (router.py).
    """
    return sha256(authorization.encode("utf-8", "surrogatepass")).hexdigest()[:32] if authorization else ""


class NameTurns:
    """ASGI middleware of Ray's proxy."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = [(key, value) for key, value in scope["headers"] if normalized(key) != HEADER.encode()]
        turn = TurnName()
        if scope["method"] == "POST" and scope["path"].endswith(ENDPOINTS):
            body, receive = await read_body(receive)
            texts = {key.decode("latin-1").lower(): value.decode("latin-1").strip() for key, value in headers}
            turn = turn_name(body, texts) if body is not None else turn
        elif (rank := requested_rank(scope)) is not None:
            turn = TurnName(rank=rank)
        headers.append((HEADER.encode(), str(turn).encode()))
        return await self._app({**scope, "headers": headers}, receive, send)


def normalized(key: bytes) -> bytes:
    """A header's name as Ray compares it: proxies on the way may write _ for -."""
    return key.lower().replace(b"_", b"-")


def requested_rank(scope: Any) -> int | None:
    """The replica that a GET with `?replica=N` is for; None: any."""
    if scope["method"] != "GET":
        return None
    rank = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("replica", [""])[0]
    return int(rank) if rank.isdecimal() and len(rank) < 9 else None


async def read_body(receive: Receive) -> tuple[bytes | None, Receive]:
    """The whole body, and a receive that returns it again; None: too long, or its client left."""
    parts: list[Message] = []
    size = 0
    while True:
        message = await receive()
        parts.append(message)
        size += len(message.get("body", b""))
        if message["type"] != "http.request" or size > MOST_BYTES or not message.get("more_body", False):
            break
    kept = iter(parts)

    async def receive_again() -> Message:
        replayed = next(kept, None)
        return replayed if replayed is not None else await receive()

    whole = parts[-1]["type"] == "http.request" and size <= MOST_BYTES
    return b"".join(part.get("body", b"") for part in parts) if whole else None, receive_again


def middlewares() -> list[Middleware]:
    """The function that RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names."""
    return [Middleware(NameTurns)]
