"""The parts of an HTTP request that `to_sampling_params` does not get: some headers, and Anthropic's fields.
Adds headers about the turn to the response.

Seam: Starlette.__call__, the ASGI entry point of vLLM's FastAPI app in all versions. An ASGI request has a
task of its own, so a context variable set there reaches its callees, and no other request.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from starlette.applications import Starlette

from continuum_lmcache.programs.session_fields import HEADERS
from continuum_lmcache.vllm_plugin.hooks import wrapping

headers: ContextVar[Mapping[str, str]] = ContextVar("continuum_headers", default={})  # noqa: B039 (never changed)
response_headers: ContextVar[dict[str, str] | None] = ContextVar("continuum_response_headers", default=None)
body: ContextVar[Mapping[str, Any]] = ContextVar("continuum_body", default={})  # noqa: B039


def install() -> None:
    """Wrap the application of this API server, once."""
    stock = Starlette.__call__

    @wrapping.hook(Starlette)
    async def __call__(self: Any, scope: Any, receive: Any, send: Any) -> Any:
        if scope["type"] != "http":
            return await stock(self, scope, receive, send)
        headers.set(program_headers(scope["headers"]))
        added: dict[str, str] = {}
        response_headers.set(added)  # the endpoint fills it, perhaps from another task

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start" and added:
                more = [(name.encode(), value.encode()) for name, value in added.items()]
                message = {**message, "headers": [*message.get("headers", ()), *more]}
            await send(message)

        return await stock(self, scope, receive, with_headers)


def add_response_header(name: str, value: str) -> None:
    """Add this header to the response to this task's request, if a header can hold the value."""
    added = response_headers.get()
    if added is not None and value.isascii() and value.isprintable():
        added[name] = value


def program_headers(raw: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """The headers that may name a request's program, the first of each name: no credentials."""
    found: dict[str, str] = {}
    for name, value in raw:
        text = name.decode("latin-1").lower()
        if text in HEADERS:
            found.setdefault(text, value.decode("latin-1").strip())
    return found
