"""Converts vLLM's Request into this package's values.

Reads, on vLLM 0.30 to 0.33: Request.sampling_params.extra_args, .cache_salt, .block_hashes,
.status, .priority, .session_id; ModelRunnerOutput.req_id_to_index, .sampled_token_ids.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

from vllm.logger import init_logger
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from continuum_lmcache.config import ContinuumConfig
from continuum_lmcache.errors import RequestError
from continuum_lmcache.programs.identity import ProgramFields, name, parse, tenant_of
from continuum_lmcache.programs.prompt_linker import ProgramLink
from continuum_lmcache.programs.session_fields import unused_fields
from continuum_lmcache.types import ProgramId, TurnId

logger = init_logger("vllm.continuum_lmcache")
_next_warning_s = [-math.inf]

STOPPED = {
    getattr(RequestStatus, name)
    for name in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION")
    if hasattr(RequestStatus, name)
}


@dataclass(slots=True)
class TurnState:
    """A turn from its arrival until its end."""

    id: TurnId
    program: ProgramId | None
    fields: ProgramFields
    arrival_s: float
    program_arrival_s: float
    place_s: float  # in the queue: its program's arrival, or its own
    queued_s: float  # since when it may run: its arrival, or its program's start
    priority: int
    tenant: str = ""
    has_all_input: bool = False  # of a streaming session whose client has no more
    held: bool = False  # its program waits to start (admission/controller.py)
    refused_s: float | None = None  # when it was first in the queue and there were no blocks
    overdue_s: float = math.inf  # its arrival, once it has waited for LONGEST_WAIT_S
    started_s: float | None = None
    first_token_s: float | None = None  # from its arrival
    gpu_tokens: int = 0  # of the prompt, found in vLLM's prefix cache
    loaded_tokens: int = 0  # of the prompt, loaded by the connector
    link: ProgramLink | None = None  # to the turn that it continues, if it names no program

    @property
    def running_rank(self) -> tuple[bool, int, float, float]:
        """The order in which turns keep scarce memory. Last steps end soon, so they are first."""
        return (not self.fields.is_last_step, self.priority, self.program_arrival_s, self.arrival_s)


class TurnTable(dict[TurnId, TurnState]):
    """Live turns by id: one record each. `drop` is the whole clean-up."""

    def __init__(self) -> None:
        super().__init__()
        self.to_rekey: set[TurnId] = set()  # waiting turns whose key in the queue is out of date
        self.preempted: set[TurnId] = set()  # turns that ran and do not run now
        self.refused_memory: set[TurnId] = set()  # waiting turns that got no blocks
        self.without_token: set[TurnId] = set()  # turns that ran and have not generated a token

    def drop(self, turn_id: TurnId) -> TurnState | None:
        """Drop a turn that has ended; None: it was not known."""
        self.preempted.discard(turn_id)
        self.refused_memory.discard(turn_id)
        self.without_token.discard(turn_id)
        return self.pop(turn_id, None)

    def on_output(self, now_s: float, output: ModelRunnerOutput) -> None:
        """A step ended: note the turns that generated their first token in it."""
        places, sampled = output.req_id_to_index, output.sampled_token_ids
        if not sampled:
            return
        for turn_id in [t for t in self.without_token if t in places and len(sampled[places[t]])]:
            self.without_token.discard(turn_id)
            self[turn_id].first_token_s = now_s - self[turn_id].arrival_s

    def is_waiting(self, turn_id: TurnId) -> bool:
        """Whether the turn is in the queue and has not run yet."""
        turn = self.get(turn_id)
        return turn is not None and turn.started_s is None


def turn_state_of(now_s: float, request: Request, config: ContinuumConfig) -> tuple[TurnState, list[str]]:
    """The request as a turn without its program yet, and the names of ignored fields."""
    fields, bad = identity(request)
    ignored = [*([bad] if bad else []), *unused_fields(extra_args(request))]
    priority = request.priority
    if priority and not config.honor_priority:
        logger.warning_once("A request's priority is ignored: see continuum.honor_priority (logged once)")
        ignored, priority = [*ignored, "priority"], 0
    tenant = tenant_of(request.cache_salt, fields.owner)
    if fields.turns and tenant and not config.honor_program_age:
        logger.warning_once(
            "program_turns of tenants is ignored: see continuum.honor_program_age (logged once)"
        )
        ignored, fields = [*ignored, "program_turns"], replace(fields, turns=0, age_s=0.0)
    turn_id, times_s = TurnId(request.request_id), (now_s, now_s, now_s, now_s)
    return TurnState(turn_id, None, fields, *times_s, priority, tenant), ignored


def identity(request: Request) -> tuple[ProgramFields, str]:
    """The request's fields about its program; the second value names a field that could not be used.

    API servers have refused bad fields already. Values from other ways (LLM.generate, a
    session id) must not harm the engine: a bad one is ignored, and the caller counts it.
    """
    sent, bad = extra_args(request), ""
    try:
        fields = parse(sent)
    except RequestError as error:
        fields, bad = ProgramFields(), str(error).split()[0]
    params = request.sampling_params
    is_beam = params is None or params.max_tokens == 1  # of the session's search
    if fields.job_id is None and not bad and not is_beam:
        try:
            session = name("session_id", request.session_id or None)
        except RequestError:
            session, bad = None, "session_id"
        fields = replace(fields, job_id=session)
    return fields, bad


def extra_args(request: Request) -> dict[str, Any]:
    """The extra arguments from the API server, or from the caller of LLM.generate."""
    params = request.sampling_params
    return (params.extra_args if params is not None else None) or {}


def is_end_of_turn(request: Request) -> bool:
    """Whether the request ended as a turn does: it did not fail, and its client did not leave.

    Stop strings are found in the API server, which then aborts the request here: such an abort is
    an end of turn. A disconnect of a request with stop strings looks the same, and costs one TTL.
    """
    if request.status in STOPPED:
        return True
    params = request.sampling_params
    has_stop = params is not None and bool(params.stop)
    return has_stop and request.status == RequestStatus.FINISHED_ABORTED and request.num_output_tokens > 0


def warn_each_minute(message: str) -> None:
    """Log a warning that clients can cause, once a minute at most."""
    now_s = time.monotonic()
    if now_s >= _next_warning_s[0]:
        _next_warning_s[0] = now_s + 60.0
        logger.warning("%s (logged once a minute)", message)
