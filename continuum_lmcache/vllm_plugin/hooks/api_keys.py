"""Separates requests by their API keys: a keyed hash of the key goes to the engine, the key does not.

Seam, unchanged from vLLM 0.30 to 0.33, run on 0.32: AuthenticationMiddleware.__call__, which vLLM puts
in front of its endpoints only where keys are configured. An ASGI request has a task of its own, so a
context variable reaches its `to_sampling_params` (request_fields.py).
"""

from __future__ import annotations

import hmac
import os
import secrets
from contextvars import ContextVar
from hashlib import sha256
from typing import Any

from starlette.datastructures import Headers

from continuum_lmcache.vllm_plugin.hooks import wrapping

SECRET = "_CONTINUUM_KEY_SECRET"  # not a setting: the first process makes it, its API servers inherit it
owner: ContextVar[str] = ContextVar("continuum_owner", default="")


def install() -> None:
    """Wrap vLLM's authentication in this API server, once."""
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    share_secret()
    stock = AuthenticationMiddleware.__call__

    @wrapping.hook(AuthenticationMiddleware)
    def __call__(self: Any, scope: Any, receive: Any, send: Any) -> Any:
        if scope["type"] in ("http", "websocket"):
            owner.set(owner_of(Headers(scope=scope).get("Authorization", "")))
        return stock(self, scope, receive, send)


def share_secret() -> None:
    """Make the secret, unless the parent process has: all API servers compute the same owner."""
    os.environ.setdefault(SECRET, secrets.token_hex(32))


def secret() -> bytes:
    """A secret that all API servers of this start share, unknown to clients; 64 bytes."""
    return os.environ[SECRET].encode()


def owner_of(authorization: str) -> str:
    """The keyed hash of a bearer token, 32 characters."""
    _, _, token = authorization.partition(" ")
    return hmac.new(secret(), token.encode(), sha256).hexdigest()[:32]
