"""vLLM's own request classes behind its own application and authentication; no engine.

post(app([]), "/v1/messages", job_id="j")  # -> the extra_args that would go to the engine
send(app([]), "/v1/messages", headers, body)  # -> all that would
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import httpx
from fastapi import FastAPI, Request
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from continuum_lmcache.vllm_plugin.hooks import request_fields

MESSAGES = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
}


def app(keys: list[str]) -> FastAPI:
    """vLLM's request classes behind vLLM's authentication; returns the engine's parameters."""
    request_fields.install()
    return plain_app(keys)


def plain_app(keys: list[str]) -> FastAPI:
    """The same without our hooks, in a process without them."""
    served = FastAPI()

    @served.post("/v1/completions")
    async def completions(request: CompletionRequest) -> dict[str, Any]:
        return to_engine(request)

    @served.post("/v1/chat/completions")
    async def chat(request: ChatCompletionRequest) -> dict[str, Any]:
        return to_engine(request)

    @served.post("/v1/responses")
    async def responses(request: ResponsesRequest) -> dict[str, Any]:
        return to_engine(request)

    @served.post("/v1/messages")
    async def messages(request: AnthropicMessagesRequest, raw_request: Request) -> dict[str, Any]:
        class Serving(AnthropicServingMessages):
            def __init__(self) -> None:
                """Only the part that converts a message into a chat completion."""
                self._merge_inline_system = False

            async def create_chat_completion(self, request: Any, *_: Any) -> Any:
                raise Sent(to_engine(request))

        try:
            await Serving().create_messages(request, raw_request)
        except Sent as sent:
            return sent.args[0]
        raise AssertionError("create_messages answered without a chat completion")

    if keys:
        served.add_middleware(AuthenticationMiddleware, tokens=keys)
    return served


def to_engine(request: Any) -> dict[str, Any]:
    """The parameters of a request, with the fields about its program separate."""
    params = request.to_sampling_params(16, {})
    request_fields.set_owner(params)  # as AsyncLLM.add_request does
    extra, params.extra_args = dict(params.extra_args or {}), None
    messages = getattr(request, "messages", None)
    return {"extra_args": extra, "params": repr(params), "messages": repr(messages), "id": request.request_id}


class Sent(Exception):
    """Has the parameters that would have been sent to the engine."""


def ask(
    served: FastAPI, path: str, headers: Mapping[str, str], body: Mapping[str, Any], raises: bool = True
) -> httpx.Response:
    """The answer. `raises`: what the application raises comes out here."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(served, raise_app_exceptions=raises)
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            content = json.dumps(body)  # httpx itself encodes no lone surrogate
            in_json = {"content-type": "application/json", **headers}
            return await client.post(path, content=content, headers=in_json)

    return asyncio.run(send())


def send(served: FastAPI, path: str, headers: Mapping[str, str], body: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's parameters of this request."""
    response = ask(served, path, headers, body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def post(served: FastAPI, path: str, key: str | None = None, **fields: Any) -> dict[str, Any]:
    """The fields about the program of a small request."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"model": "m", **BODIES[path], **fields}
    return dict(send(served, path, headers, body)["extra_args"])
