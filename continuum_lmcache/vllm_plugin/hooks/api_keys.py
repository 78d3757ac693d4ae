"""Separates requests by their API keys: a hash of the key goes to the engine, the key does not.

http_fields.py sets `owner` where keys are configured. An ASGI request has a task of its own, so a context
variable reaches its `to_sampling_params` (request_fields.py). What is learned of a key's tools goes into a
file and is its after a restart, so the hash is the same then, and slow to compute: nobody who reads the file
finds a key by trying many.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from contextvars import ContextVar
from functools import cache
from hashlib import scrypt
from typing import Any

from continuum_lmcache.programs.identity import accepted_key, key_digest

SECRET = "_CONTINUUM_KEY_SECRET"  # not a setting: the first process makes it, its API servers inherit it
NO_KEY = "no key"  # vLLM asks for none at some paths: nobody is a tenant of its own by a key it made up
owner: ContextVar[str] = ContextVar("continuum_owner", default="")


def share_secret() -> None:
    """Make the secret, unless the parent process has: all API servers compute the same names."""
    os.environ.setdefault(SECRET, secrets.token_hex(32))


def secret() -> bytes:
    """A secret that all API servers of this start share, unknown to clients; 64 bytes."""
    return os.environ[SECRET].encode()


def keys_of(application: Any) -> list[str]:
    """The keys that vLLM's server asks for; []: none. Its AuthenticationMiddleware has them as `tokens`."""
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    asking = [each for each in application.user_middleware if each.cls is AuthenticationMiddleware]
    return [key for each in asking for key in each.kwargs["tokens"]]


def owner_of(authorization: str, keys: Iterable[str]) -> str:
    """The hash of a bearer token that is one of the server's keys, 32 characters; else NO_KEY."""
    sent = accepted_key(authorization, map(key_digest, keys))
    return slow_hash(sent) if sent is not None else NO_KEY


@cache  # one for each of the server's keys
def slow_hash(digest: bytes) -> str:
    """In hex. It takes about 50 ms and 16 MB."""
    return scrypt(digest, salt=b"continuum-lmcache", n=1 << 14, r=8, p=1, dklen=16).hex()
