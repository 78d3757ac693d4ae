"""One streamed completion, by token ids, from a server that speaks OpenAI's API as vLLM does.

Prompts go as token ids and answers come back as token ids (vLLM's `return_token_ids`), so lengths
are exact and the next prompt can extend the real output. aiohttp, not the openai package: it reads
a stream at a fraction of the cost, and the measurement must not include the load generator.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

LONGEST_LINE_BYTES = 1 << 26  # the first event repeats the prompt: about 6 bytes a token


Heard = Callable[[float, int], None]  # when some output tokens came, on the loop's clock, and how many


def unheard(_now_s: float, _tokens: int) -> None:
    """Nobody listens while an answer comes."""


class ServerUnusable(Exception):
    """The server cannot be used for a replay. The message is one line: the reason and what to do."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A streamed completion. Times on the event loop's clock."""

    first_s: float  # the first token
    done_s: float
    token_ids: tuple[int, ...]
    prompt_tokens: int  # as the server counted them
    cached_tokens: int | None  # None: the server does not say (--enable-prompt-tokens-details)


class TurnFailed(Exception):
    """One request got no complete answer."""


class Client:
    """A base URL (ending in /v1), and as many connections as there are requests."""

    def __init__(self, base_url: str, timeout_s: float) -> None:
        self.base_url = base_url.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=timeout_s)
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Client:
        # a new connection each time: servers close idle ones (uvicorn after 5 s), and a request sent
        # on one that is just being closed would count as the server's failure
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=self._timeout, read_bufsize=LONGEST_LINE_BYTES
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def models(self) -> dict[str, int | None]:
        """The served models and their windows in tokens (None: not reported). Raises ServerUnusable."""
        url = f"{self.base_url}/models"
        try:
            async with self._session.get(url) as response:
                response.raise_for_status()
                rows = (await response.json())["data"]
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
            raise ServerUnusable(f"no OpenAI-compatible server at {url}: {described(error)}") from error
        return {row["id"]: row.get("max_model_len") for row in rows}

    async def metrics_text(self, engine_url: str = "") -> str:
        """What /metrics says, or "" where there is none. `engine_url`: of the server behind a proxy."""
        url = (engine_url or self.base_url.removesuffix("/v1")) + "/metrics"
        try:
            async with self._session.get(url) as response:
                return await response.text() if response.status == 200 else ""
        except (aiohttp.ClientError, TimeoutError):
            return ""

    async def complete(self, body: Mapping[str, Any], heard: Heard = unheard) -> Answer:
        """POST /completions and read its stream to the end; `heard` gets what comes. Raises TurnFailed."""
        try:
            async with self._session.post(f"{self.base_url}/completions", json=body) as response:
                if response.status != 200:
                    raise TurnFailed(f"HTTP {response.status}: {(await response.text())[:300]}")
                return await _read(_events(response.content), heard)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise TurnFailed(described(error)) from error


def described(error: BaseException) -> str:
    """An error as one line; some have no text of their own."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def request_body(model: str, prompt: Sequence[int], output_tokens: int) -> dict[str, Any]:
    """A completion of exactly `output_tokens` tokens (at least 1), greedy, streamed."""
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max(1, output_tokens),
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream up to [DONE]. Raises TurnFailed if it ends before.

    The stream is read to its end: closing it at [DONE] makes a proxy that still copies abort the request.
    """
    is_done = False
    async for line in content:
        if is_done or not line.startswith(b"data:"):
            continue
        text = line[5:].strip()
        if text == b"[DONE]":
            is_done = True
            continue
        event = json.loads(text)
        if "error" in event:
            raise TurnFailed(str(event["error"])[:300])
        yield event
    if not is_done:
        raise TurnFailed("the stream ended before [DONE]")


async def _read(events: AsyncIterator[dict[str, Any]], heard: Heard) -> Answer:
    loop = asyncio.get_running_loop()
    arrivals_s: list[float] = []
    done_s = 0.0  # the last event, not the stream's end: when a server closes is not its answer's time
    token_ids: list[int] = []
    usage: dict[str, Any] = {}
    async for event in events:
        done_s = loop.time()
        for choice in event["choices"]:
            if choice.get("token_ids") is None:
                raise TurnFailed("the server returns no token_ids: it needs vLLM's return_token_ids")
            if choice["token_ids"]:
                arrivals_s.append(done_s)
                token_ids += choice["token_ids"]
                heard(done_s, len(choice["token_ids"]))
        usage = event.get("usage") or usage
    if not token_ids or "prompt_tokens" not in usage:
        raise TurnFailed("the stream held no token or no usage")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return Answer(arrivals_s[0], done_s, tuple(token_ids), usage["prompt_tokens"], cached)
