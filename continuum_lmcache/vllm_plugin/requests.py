"""Converts vLLM's Request into this package's values.

Reads, on vLLM 0.30 to 0.33: Request.sampling_params.extra_args, .cache_salt, .block_hashes,
.status, .priority, .session_id.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm.logger import init_logger
from vllm.v1.request import Request, RequestStatus

from continuum_lmcache.config import ContinuumConfig
from continuum_lmcache.engine import NewTurn
from continuum_lmcache.errors import RequestError
from continuum_lmcache.programs.identity import SERVER_FIELDS, ProgramFields, name, namespace_of, parse
from continuum_lmcache.programs.session_fields import NESTED, SentFields, program_values, unused_fields
from continuum_lmcache.types import TurnId

logger = init_logger("vllm.continuum_lmcache")

STOPPED = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
)


def new_turn(request: Request, config: ContinuumConfig, from_rust: bool = False) -> tuple[NewTurn, list[str]]:
    """The request as a turn that has arrived, and the names of ignored fields.

    A request for one token without any name calls no tool, so it is linked to no program: it is a beam of a
    search, or scores a prompt. `from_rust`: through vLLM's HTTP server in Rust.
    """
    fields, ignored = identity(request, from_rust)
    if NESTED in ignored:
        logger.warning_once(
            "A request's body has an object extra_body, of which nothing is read: put its fields into the "
            "body itself, as SDKs do with their argument of that name (logged once)"
        )
    priority = request.priority
    if priority and not config.honor_priority:
        logger.warning_once("A request's priority is ignored: see continuum.honor_priority (logged once)")
        ignored, priority = [*ignored, "priority"], 0
    namespace = namespace_of(request.cache_salt, fields.owner)
    if fields.turns and namespace and not config.honor_program_age:
        logger.warning_once(
            "program_turns of tenants is ignored: see continuum.honor_program_age (logged once)"
        )
        ignored, fields = [*ignored, "program_turns"], replace(fields, turns=0, age_s=0.0)
    is_named = fields.job_id is not None or bool(fields.hint)
    may_be_linked = config.infer_programs and (is_named or request.max_tokens > 1)
    return NewTurn(TurnId(request.request_id), fields, namespace, priority, may_be_linked), ignored


def identity(request: Request, from_rust: bool = False) -> tuple[ProgramFields, list[str]]:
    """The request's fields about its program, and the names of those that could not be used.

    API servers have refused bad fields already. Values from other ways (LLM.generate, a
    session id) must not harm the engine: a bad one is ignored, and the caller counts it.
    """
    try:
        sent = sent_to_rust(request) if from_rust else extra_args(request)
        fields, ignored = parse(sent), unused_fields(sent)
    except RequestError as error:
        return ProgramFields(), [str(error).split()[0]]
    params = request.sampling_params
    is_beam = params is None or params.max_tokens == 1  # of the session's search
    if fields.job_id is None and not is_beam:
        try:
            fields = replace(fields, job_id=name("session_id", request.session_id or None))
        except RequestError:
            ignored = ignored or ["session_id"]  # it may be a header that is counted already
    return fields, ignored


def sent_to_rust(request: Request) -> dict[str, Any]:
    """What vLLM's server in Rust has passed on of a request, read as our API server reads it: by the table,
    and without the fields that only it may set. Raises RequestError."""
    xargs = {k: v for k, v in extra_args(request).items() if k not in SERVER_FIELDS}
    return xargs | program_values(SentFields({"session_id": request.session_id or None}, xargs, {}))


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
