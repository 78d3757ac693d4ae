"""What `to_sampling_params` does not get of an HTTP request: some headers, the owner of the API key,
and Anthropic's fields. Adds headers about the turn to the response, and our routes to the application.

Seams, unchanged from vLLM 0.30 to 0.33: Starlette.__call__, the ASGI entry point of vLLM's FastAPI app, and
its user_middleware, which has vLLM's AuthenticationMiddleware, with its `tokens`, only where keys are
configured. An ASGI request has a task of its own, so a context variable set there reaches its callees, and no
other request.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers

from continuum_lmcache.programs.session_fields import HEADERS
from continuum_lmcache.vllm_plugin.hooks import api_keys, program_release, wrapping
from continuum_lmcache.vllm_plugin.live import routes

headers: ContextVar[Mapping[str, str]] = ContextVar("continuum_headers", default={})  # noqa: B039 (never changed)
response_headers: ContextVar[dict[str, str] | None] = ContextVar("continuum_response_headers", default=None)
body: ContextVar[Mapping[str, Any]] = ContextVar("continuum_body", default={})  # noqa: B039


def install() -> None:
    """Wrap the application of this API server, once."""
    api_keys.share_secret()
    stock = Starlette.__call__

    @wrapping.hook(Starlette)
    async def __call__(self: Any, scope: Any, receive: Any, send: Any) -> Any:
        if scope["type"] == "lifespan":
            routes.add_to(self)
        if scope["type"] in ("http", "websocket"):
            sent = Headers(scope=scope)
            headers.set({name: sent[name].strip() for name in HEADERS if name in sent})
            if keys := api_keys.keys_of(self):
                api_keys.owner.set(api_keys.owner_of(sent.get("authorization", ""), keys))
        if program_release.is_asked(self, scope):
            return await program_release.answer(self, scope, receive, send)
        if scope["type"] != "http":
            return await stock(self, scope, receive, send)
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
