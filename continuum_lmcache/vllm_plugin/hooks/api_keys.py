"""Separates requests by their API keys: a keyed hash of the key goes to the engine, the key does not.

http_fields.py sets `owner` where keys are configured. An ASGI request has a task of its own, so a context
variable reaches its `to_sampling_params` (request_fields.py).
"""

from __future__ import annotations

import hmac
import os
import secrets
from contextvars import ContextVar
from hashlib import sha256

SECRET = "_CONTINUUM_KEY_SECRET"  # not a setting: the first process makes it, its API servers inherit it
owner: ContextVar[str] = ContextVar("continuum_owner", default="")


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
