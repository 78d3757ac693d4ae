"""Passes the program's name from an HTTP request to the scheduler, on all four endpoints.

Seams, read on vLLM 0.30 to 0.33, run on 0.32: `to_sampling_params` of the three OpenAI requests, whose
unknown fields are attributes; and AnthropicServingMessages.create_messages, whose request drops unknown
fields, so they are read from the body again. Headers: http_fields.py. A bad field of ours raises
RequestError (a ValueError) here, which vLLM answers with HTTP 400; it never reaches the engine. The answer's
headers have the program's name, for a router in front.

Token-in requests (/inference/v1/generate) and beams pass by these classes. So the owner is set in
AsyncLLM.add_request, through which each request goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from continuum_lmcache.bounded_dict import BoundedDict
from continuum_lmcache.errors import RequestError
from continuum_lmcache.programs.identity import OWNER_FIELD, SERVER_FIELDS, TOOLS_FIELD
from continuum_lmcache.programs.session_fields import BODY_FIELDS, SentFields, program_values
from continuum_lmcache.telemetry.recorder import digest
from continuum_lmcache.vllm_plugin.hooks import api_keys, http_fields, wrapping

OPENAI = {
    "vllm.entrypoints.openai.chat_completion.protocol": "ChatCompletionRequest",
    "vllm.entrypoints.openai.completion.protocol": "CompletionRequest",
    "vllm.entrypoints.openai.responses.protocol": "ResponsesRequest",
}
MAX_RESPONSES = 10_000
SESSION_HEADER = "x-session-id"  # a client that sends it back names the program


responses: BoundedDict[str, str] = BoundedDict(MAX_RESPONSES)
"""The program of each stored response. vLLM stores responses in this process too."""


def install() -> None:
    """Wrap the request classes of this process, once. Only API servers need it."""
    http_fields.install()
    for module, name in OPENAI.items():
        add_identity(getattr(import_module(module), name))
    keep_body(import_module("vllm.entrypoints.anthropic.serving").AnthropicServingMessages)
    add_owner(import_module("vllm.v1.engine.async_llm").AsyncLLM)


def sent(body: Mapping[str, Any], xargs: Mapping[str, Any] | None) -> SentFields:
    """A request's parts; the id of the response that it continues is replaced by the program's name."""
    found = {name: value for name in BODY_FIELDS if (value := body.get(name)) is not None}
    if isinstance(before := found.get("previous_response_id"), str):
        found["previous_response_id"] = responses.get(before, before)
    return SentFields(found, xargs or {}, http_fields.headers.get())


def add_identity(request: Any) -> None:
    """Have a request's to_sampling_params add the program's fields and the owner to extra_args."""
    stock = request.to_sampling_params

    @wrapping.hook(request)
    def to_sampling_params(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = {name: getattr(self, name, None) for name in BODY_FIELDS}
        found = program_values(sent({**own, **http_fields.body.get()}, self.vllm_xargs))
        params = stock(self, *args, **kwargs)
        extra = {k: v for k, v in (params.extra_args or {}).items() if k not in SERVER_FIELDS} | found
        if "tools" in type(self).model_fields and (tools := self.tools):  # else vLLM has not checked them
            extra[TOOLS_FIELD] = digest(str([tool_name(tool) for tool in tools]))
        params.extra_args = extra or None
        if "job_id" in found and "previous_response_id" in type(self).model_fields:
            responses[self.request_id] = str(found["job_id"])
        if "job_id" in found:
            http_fields.add_response_header(SESSION_HEADER, str(found["job_id"]))
        return params


def add_owner(engine: Any) -> None:
    """Have add_request say whose request it is by the API key alone: a client's own word is dropped."""
    stock = engine.add_request

    @wrapping.hook(engine)
    async def add_request(self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kw: Any) -> Any:
        set_owner(getattr(prompt, "sampling_params", None) or params)
        return await stock(self, request_id, prompt, params, *args, **kw)


def set_owner(params: Any) -> None:
    if hasattr(params, "extra_args"):
        owner = {OWNER_FIELD: key} if (key := api_keys.owner.get()) else {}
        said = {k: v for k, v in (params.extra_args or {}).items() if k != OWNER_FIELD}
        params.extra_args = {**said, **owner} or None


def tool_name(tool: Any) -> str:
    """The name of an offered function, else the kind of the tool."""
    fields = tool if isinstance(tool, Mapping) else vars(tool)
    function = fields.get("function")
    if function is not None:
        return tool_name(function)
    return str(fields.get("name") or fields.get("type"))


def keep_body(serving: Any) -> None:
    """Have create_messages keep the body's fields for the chat completion that it makes."""
    stock = serving.create_messages

    @wrapping.hook(serving)
    async def create_messages(self: Any, request: Any, raw_request: Any = None) -> Any:
        body = await raw_request.json() if raw_request is not None else {}
        found = {name: body[name] for name in BODY_FIELDS if body.get(name) is not None}
        try:
            program_values(sent(found, request.vllm_xargs))
        except RequestError as error:  # raised, it would fill the log with clients' mistakes
            return self.create_error_response(error)
        kept = http_fields.body.set(found)
        try:
            return await stock(self, request, raw_request)
        finally:
            http_fields.body.reset(kept)
