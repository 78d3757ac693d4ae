"""A small completions server for tests of the load generator: streams token ids, and keeps the requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest


def request_is_open(response: web.StreamResponse) -> bool:
    """Whether the client is still there."""
    request = response._req
    return request is not None and request.transport is not None


class FakeServer:
    """Answers a prompt with tokens that depend on its last token, so a client cannot guess them."""

    def __init__(
        self, *, window: int = 8192, fails_at: int | None = None, how: str = "http", lingers_s: float = 0.0
    ) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.answers: list[list[int]] = []
        self.now_answering = self.most_at_once = 0
        self.read_to_end_s = 0.0  # on the loop's clock; 0: no client stayed so long
        self._lingers_s = lingers_s
        self._window, self._fails_at, self._how = window, fails_at, how
        self._registry = CollectorRegistry()
        engine = {"model_name": "fake", "engine": "0"}

        def counter(name: str, labels: dict[str, str]) -> Counter:
            return Counter(name, "", list(labels), registry=self._registry).labels(**labels)

        self._hits = counter("vllm:prefix_cache_hits", engine)
        self._pins = counter("continuum_pins", {"outcome": "taken"})
        self._loaded = counter("continuum_prompt_tokens", {"tier": "dram"})
        counter("vllm:generation_tokens", engine).inc(99)
        usage = Gauge("vllm:kv_cache_usage_perc", "", list(engine), registry=self._registry)
        usage.labels(**engine).set(0.25)
        for metric in (self._hits, self._pins, self._loaded):
            metric.inc(1000)  # counts from before the replay do not concern it

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._completions)
        async with TestServer(app) as server:
            yield f"http://127.0.0.1:{server.port}/v1"

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake", "max_model_len": self._window}]})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry))

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        for metric, amount in ((self._hits, 10), (self._loaded, 3), (self._pins, 1)):
            metric.inc(amount)
        failing = self._fails_at == len(self.bodies)
        if failing and self._how == "http":
            return web.json_response({"error": {"message": "no room"}}, status=503)
        answer = [(body["prompt"][-1] + 7 * i) % 4000 + 1 for i in range(body["max_tokens"])]
        self.answers.append(answer)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.now_answering += 1
        self.most_at_once = max(self.most_at_once, self.now_answering)
        await self._stream(response, body["prompt"], answer, failing)
        if self._lingers_s:
            await asyncio.sleep(self._lingers_s)
            if request.transport is not None and not request.transport.is_closing():
                self.read_to_end_s = asyncio.get_running_loop().time()
        self.now_answering -= 1
        return response

    async def _stream(
        self, response: web.StreamResponse, prompt: list[int], answer: list[int], failing: bool
    ) -> None:
        await self._event(response, {"choices": [{"token_ids": [], "prompt_token_ids": prompt}]})
        for token in answer:
            ids = {} if failing and self._how == "no ids" else {"token_ids": [token]}
            await self._event(response, {"choices": [{"text": "x", **ids}]})
            if failing and self._how == "error event":
                await self._event(response, {"error": {"message": "engine died"}})
            if failing and self._how == "cut":
                return
            if failing and self._how == "silence":
                while request_is_open(response):
                    await asyncio.sleep(0.01)
                return
            await asyncio.sleep(0.001)
        usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": len(prompt) // 2}}
        await self._event(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")

    async def _event(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
