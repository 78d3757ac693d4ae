"""Two read-only routes of the API server, behind its API key: what programs do now, and the recording.

    GET /v1/continuum/programs            a list with one JSON object a data-parallel rank
    GET /v1/continuum/recording?rank=0    the file scheduler_timestamps as it is now

Seams, read on vLLM 0.32: EngineCore.scheduler, .process_utility by a method's name, a Future as its result;
AsyncMPClient.core_engines, ._call_utility_async; state.engine_client of the application, whose paths below
/v1 AuthenticationMiddleware guards.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from continuum_lmcache.vllm_plugin.hooks import api_keys
from continuum_lmcache.vllm_plugin.hooks.program_release import continuum_release

PREFIX = "/v1/continuum/"
NO_RECORDING = "this server keeps no recording: set continuum.run_output_dir (or RUN_OUTPUT_DIR) to a folder"

SEVERAL_KEYS = (
    "this server has several API keys, and this would tell each what the others' programs do: read the "
    "recording in continuum.run_output_dir on the server"
)


def continuum_programs(engine_core: Any) -> str:
    """Of EngineCore: what `LivePrograms.text` says."""
    live = engine_core.scheduler.live
    return str(live.text())


def continuum_recording(engine_core: Any) -> Future[str]:
    """Of EngineCore: what `LivePrograms.save_recording` says."""
    live = engine_core.scheduler.live
    saved: Future[str] = live.save_recording()
    return saved


def install() -> None:
    """In an engine's process: its API servers may call these."""
    from vllm.v1.engine.core import EngineCore

    for method in (continuum_programs, continuum_recording, continuum_release):
        setattr(EngineCore, method.__name__, method)


def add_to(application: Starlette) -> None:
    """In an API server: the routes, before it serves."""
    if not any(getattr(route, "path", "").startswith(PREFIX) for route in application.router.routes):
        told = {"programs": programs, "recording": recording}
        if len(api_keys.keys_of(application)) > 1:
            told = dict.fromkeys(told, several_keys)
        application.router.routes[:0] = [Route(PREFIX + name, endpoint) for name, endpoint in told.items()]


async def programs(request: Request) -> Response:
    client = client_of(request)
    texts = [
        await client._call_utility_async(continuum_programs.__name__, engine=engine)
        for engine in client.core_engines
    ]
    return Response(f"[{', '.join(texts)}]", media_type="application/json")


async def recording(request: Request) -> Response:
    client, rank = client_of(request), request.query_params.get("rank", "0")
    if not (rank.isascii() and rank.isdigit() and int(rank) < len(client.core_engines)):
        return refusal(400, f"rank is {rank!r:.80}; it must be a number below {len(client.core_engines)}")
    engine = client.core_engines[int(rank)]
    path = await client._call_utility_async(continuum_recording.__name__, engine=engine)
    if not path:
        return refusal(404, NO_RECORDING)
    if not Path(path).is_file():
        return refusal(404, "the recording is on another machine, where the engine runs")
    return FileResponse(path, media_type="application/json", filename=Path(path).name)


async def several_keys(request: Request) -> Response:  # noqa: ARG001 (Starlette passes it)
    return refusal(403, SEVERAL_KEYS)


def client_of(request: Request) -> Any:
    state = request.app.state
    return state.engine_client.engine_core


def refusal(status: int, why: str) -> JSONResponse:
    return JSONResponse({"error": {"message": why, "code": status}}, status)
