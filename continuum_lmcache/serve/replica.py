"""One replica of the deployment: vLLM's server in Ray's process, which reports to the fleet's state.

Seams, read and run on Ray 2.60.0: serve.ingress() with __serve_build_asgi_app__, check_health,
record_replica_metadata, record_autoscaling_stats, serve.get_replica_context, serve.get_deployment_actor; the
request context's session_id. Of vLLM 0.32: the request id of a Responses answer. vLLM itself is in
vllm_plugin/watched_server.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from fastapi.responses import JSONResponse, PlainTextResponse, Response
from ray import serve
from ray.exceptions import RayError
from ray.serve.context import _get_serve_request_context

from continuum_lmcache.fleet.fleet import ReplicaId, ReplicaReport
from continuum_lmcache.programs.identity import MOST_AGE_S, MOST_TURNS, hidden
from continuum_lmcache.serve import lmcache_server, scaling
from continuum_lmcache.serve.listening import listen_on_node_address_only
from continuum_lmcache.serve.names import TurnName
from continuum_lmcache.serve.replica_programs import ReplicaPrograms
from continuum_lmcache.serve.settings import ServeSettings
from continuum_lmcache.types import ProgramId

logger = logging.getLogger("ray.serve")
STATE = "fleet"  # the deployment actor's name
ANSWER_S = 5.0  # for the state's answer, at most
NO_STATE = (RayError, ValueError, TimeoutError)  # Ray raises ValueError where no actor has the name
REPORT_S = 0.5  # between two reports
GATHER_S = 0.05  # from a stored answer's start to its report, which has all that start meanwhile
PROGRESS = ("program_turns", "program_age_s")  # the engine's fields (identity.FIELDS)
RESPONSE = re.compile(r"(resp_\w+?)(?:_\d+)?")  # a stored answer's id, then the number of the prompt


class ReplicaHeader:
    """ASGI: each answer names the replica that gave it. vLLM's app takes no more middleware."""

    def __init__(self, app: Any, replica: str) -> None:
        self._app, self._header = app, (b"x-continuum-replica", replica.encode())

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_with_header(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), self._header]}
            await send(message)

        await self._app(scope, receive, send_with_header)


@serve.ingress()
class Replica:
    def __init__(self, settings: ServeSettings) -> None:
        listen_on_node_address_only()
        self._settings = settings
        self._programs, self._hurry = ReplicaPrograms(), asyncio.Event()  # to report now
        self._name = str(serve.get_replica_context().replica_id.unique_id)
        self._engine: Any = None
        self._reporting: asyncio.Task[None] | None = None

    async def __serve_build_asgi_app__(self) -> ReplicaHeader:
        """Start the engine; return vLLM's app around it, with one more path."""
        from continuum_lmcache.vllm_plugin import watched_server  # imports vllm, which only a replica needs

        os.environ.setdefault("CONTINUUM_HONOR_PROGRAM_AGE", "true")  # of all tenants: with_progress sets it
        if self._settings.lmcache_gb:
            await lmcache_server.start_on_this_node(self._settings)
        self._engine, app = await watched_server.started(self._settings.vllm_args, self._watch)
        app.add_api_route("/fleet", self.fleet, methods=["GET"])
        self._reporting = asyncio.create_task(self._report())
        return ReplicaHeader(app, self._name)

    async def fleet(self) -> Response:
        """GET /fleet: the state as JSON. While the state is missing, HTTP 503: Ray starts another within
        seconds."""
        try:
            return JSONResponse(await self._call("snapshot"))
        except NO_STATE as error:
            text = f"The fleet's state does not answer: {error}"
            return PlainTextResponse(text, 503, {"Retry-After": "2"})

    def record_replica_metadata(self) -> dict[str, Any]:
        """What routers know of a replica: `?replica=N` selects the one of rank N."""
        return {"rank": self.rank}

    def record_autoscaling_stats(self) -> dict[str, float]:
        return scaling.gauges(scaling.LIVE, scaling.IN_TIME)

    async def check_health(self) -> None:
        """Ray calls this every few seconds; an exception makes it replace the replica."""
        if self._engine is not None:
            await self._engine.check_health()
        if self._reporting is not None and self._reporting.done():
            self._reporting.result()  # raises the exception that ended it

    def __del__(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()

    @property
    def rank(self) -> int:
        return int(serve.get_replica_context().rank.rank)

    def _watch(self, sampling_params: Any, request_id: str) -> Callable[[bool], None]:
        """A prompt of the turn whose task this is (watched_server.Watch): the engine hears what its program
        did elsewhere. The next turn may call the program by the id of an answer that is stored here."""
        turn = TurnName.parse(_get_serve_request_context().session_id)
        names = [ProgramId(turn.program)] if turn.program else []
        if response := RESPONSE.fullmatch(request_id):
            names.append(hidden(response[1], bytes.fromhex(self._settings.key)))
            self._hurry.set()
        self._programs.on_start(time.monotonic(), names, turn.turns, turn.age_s)
        scaling.turns.labels(turn.why).inc()
        sampling_params.extra_args = with_progress(sampling_params.extra_args, turn)
        return lambda is_finished: self._programs.on_stop(names, is_finished, turn.is_last)

    async def _call(self, method: str, *args: object) -> Any:
        """Call the state. Its handle is looked up each time: it may be another actor now."""
        state = serve.get_deployment_actor(STATE)
        return await asyncio.wait_for(getattr(state, method).remote(*args), ANSWER_S)

    async def _report(self) -> None:
        """Report to the state each REPORT_S, and as soon as an answer is stored here: how busy this replica
        is, and its programs that have changed; to a new state all of them."""
        state = ""  # which has heard of all programs here
        while True:
            self._hurry.clear()
            programs = self._programs.report(time.monotonic(), is_complete=not state)
            requests = sum(scaling.gauges("vllm:num_requests_waiting", "vllm:num_requests_running").values())
            about = {"rank": self.rank, "pid": os.getpid()}
            report = ReplicaReport(ReplicaId(self._name), int(requests), self._engine.wait_s, about)
            try:
                state = await self._call("take_report", report, programs, state)
            except NO_STATE as error:
                if state:  # logged once, not each half second
                    logger.warning("The fleet's state does not answer (%s); the next one gets all", error)
                state = ""
            else:
                if not state:
                    continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), REPORT_S)
                await asyncio.sleep(GATHER_S)


def with_progress(extra_args: Mapping[str, Any] | None, turn: TurnName) -> dict[str, Any] | None:
    """A request's fields with its program's progress, from the fleet and not from the client.

    An engine refuses all fields of a request if one is above its bound.
    """
    kept = {name: value for name, value in (extra_args or {}).items() if name not in PROGRESS}
    if turn.turns:
        progress = min(turn.turns, MOST_TURNS), round(min(turn.age_s, MOST_AGE_S))
        kept |= dict(zip(PROGRESS, progress, strict=True))
    return kept or None
