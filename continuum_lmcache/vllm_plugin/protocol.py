"""Carries the program's name from the HTTP body to the scheduler, on all four endpoints.

Seams, read on vLLM 0.30 to 0.33, run on 0.32: `to_sampling_params` of the three OpenAI requests,
whose unknown fields stay in `model_extra`; and AnthropicServingMessages.create_messages, whose
request drops unknown fields, so that they are read from the body again. A bad field raises
RequestError (a ValueError) here, which vLLM answers with HTTP 400: none reaches the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from continuum_lmcache.errors import RequestError
from continuum_lmcache.identity import FIELDS, OWNER_FIELD, parse
from continuum_lmcache.vllm_plugin import api_keys, hooks

OPENAI = {
    "vllm.entrypoints.openai.chat_completion.protocol": "ChatCompletionRequest",
    "vllm.entrypoints.openai.completion.protocol": "CompletionRequest",
    "vllm.entrypoints.openai.responses.protocol": "ResponsesRequest",
}


def install() -> None:
    """Wrap the request classes of this process, once. Only API servers need it."""
    api_keys.install()
    for module, name in OPENAI.items():
        request = getattr(import_module(module), name)
        if not hooks.is_hooked(request.to_sampling_params):
            request.to_sampling_params = with_identity(request.to_sampling_params)
    serving = import_module("vllm.entrypoints.anthropic.serving").AnthropicServingMessages
    if not hooks.is_hooked(serving.create_messages):
        serving.create_messages = with_body_identity(serving.create_messages)


def identity_fields(body: Mapping[str, Any], xargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """The wire format's fields, checked; a top-level one wins over the same in vllm_xargs."""
    found = {name: body[name] for name in FIELDS if body.get(name) is not None}
    parse({**{name: (xargs or {}).get(name) for name in FIELDS}, **found})
    return found


def with_identity(stock: Callable[..., Any]) -> Callable[..., Any]:
    """to_sampling_params that keeps the fields, and whose the request is, in extra_args."""

    @hooks.wraps(stock)
    def to_sampling_params(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = identity_fields(self.model_extra or {}, self.vllm_xargs)
        params = stock(self, *args, **kwargs)
        stated = {**(params.extra_args or {}), **found}
        stated.pop(OWNER_FIELD, None)  # a client's own word
        if owner := api_keys.owner.get():
            stated[OWNER_FIELD] = owner
        params.extra_args = stated or None
        return params

    return to_sampling_params


def with_body_identity(stock: Callable[..., Any]) -> Callable[..., Any]:
    """create_messages that moves the fields into vllm_xargs, which it forwards."""

    @hooks.wraps(stock)
    async def create_messages(self: Any, request: Any, raw_request: Any = None) -> Any:
        body = await raw_request.json() if raw_request is not None else {}
        try:
            found = identity_fields(body, request.vllm_xargs)
        except RequestError as error:  # raised, it would fill the log with a client's mistakes
            return self.create_error_response(error)
        if found:
            request.vllm_xargs = {**(request.vllm_xargs or {}), **{k: str(v) for k, v in found.items()}}
        return await stock(self, request, raw_request)

    return create_messages
