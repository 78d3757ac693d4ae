"""`POST /programs/release` with {"program_id": NAME}: a client's word that its program has ended. The clients
of ThunderAgent, SkyRL and prime-rl send it to the root of the server when a rollout is over.

Seams, read on vLLM 0.30 to 0.33: AsyncLLM.engine_core.call_utility_async, which calls a method of EngineCore
by its name, between two steps and on all data-parallel ranks.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from continuum_lmcache.errors import RequestError
from continuum_lmcache.programs.identity import name, namespace_of, program_id
from continuum_lmcache.vllm_plugin.hooks import api_keys

PATH = "/programs/release"


def continuum_release(engine_core: Any, program: str) -> None:
    """Of EngineCore (live/routes.py: install)."""
    engine_core.scheduler.on_release(program)


def is_asked(app: Any, scope: Any) -> bool:
    """Whether this is such a request, to an application with an engine."""
    is_ours = scope["type"] == "http" and scope["path"] == PATH and scope["method"] == "POST"
    return is_ours and hasattr(getattr(app.state, "engine_client", None), "engine_core")


async def answer(app: Any, scope: Any, receive: Any, send: Any) -> None:
    """End the program. With another API key than its own there is none of that name."""
    response = JSONResponse({"error": {"message": 'send {"program_id": NAME}', "code": 400}}, 400)
    try:
        body = await Request(scope, receive).json()
        found = name("program_id", body.get("program_id"))
        salt = name("cache_salt", body.get("cache_salt"))
    except (AttributeError, RecursionError, RequestError, ValueError):
        found, salt = None, None
    if found is not None:
        program = program_id(found, namespace_of(salt, api_keys.owner.get()))
        engine_client = app.state.engine_client
        await engine_client.engine_core.call_utility_async(continuum_release.__name__, program)
        response = JSONResponse({"program_id": found, "released": True})
    await response(scope, receive, send)
