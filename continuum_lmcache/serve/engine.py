"""vLLM's engine and vLLM's own OpenAI and Anthropic app, in a replica's process; Books hear of each turn.

Nothing of vLLM's server is written again: its parser reads the options, its AsyncLLM runs the engine, its
build_app and init_app_state make the app. The engine is watched where prompts go in and results come out, so
that token counts are the engine's own.

Seams, read and run on vLLM 0.32: entrypoints.launchers (cli_args.make_arg_parser,
.validate_parsed_serve_args, app.build_app, api_server.app_state.init_app_state); AsyncLLM.generate,
.from_vllm_config, .get_supported_tasks, .model_config, .vllm_config, .output_processor.request_states
(is_prefilling, external_req_id, prompt_len). On Ray 2.60 the request context's session_id and
_internal_request_id.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from fastapi import FastAPI
from ray.serve.context import _get_serve_request_context
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.outputs import RequestOutput
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM

from continuum_lmcache.serve.books import Books
from continuum_lmcache.serve.names import TurnName
from continuum_lmcache.types import ProgramId, TurnId

PROGRESS = ("program_turns", "program_age_s")  # the engine's fields (identity.FIELDS)


class WatchedEngine(AsyncLLM):
    """vLLM's engine; `books` hear of each turn's beginning, first token and end."""

    books: Books
    _asked: dict[str, tuple[TurnId, int]]  # by request id: its turn, and the bytes of its body

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **more: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """AsyncLLM.generate, watched. The engine is told what the program did elsewhere."""
        context = _get_serve_request_context()
        turn, key = TurnName.read(context.session_id), TurnId(context._internal_request_id)
        self.books.starts(time.monotonic(), key, ProgramId(turn.program or f"~{key}"), turn.turns, turn.age_s)
        sampling_params.extra_args = under_way(sampling_params.extra_args, turn)
        self._asked[request_id] = (key, turn.body_bytes)
        prompt_tokens = generated_tokens = 0
        finished = False
        try:
            async for output in super().generate(prompt, sampling_params, request_id, **more):
                if not prompt_tokens:
                    prompt_tokens = len(output.prompt_token_ids or ())
                    self.books.first_token(key, prompt_tokens, turn.body_bytes)
                    self._asked.pop(request_id, None)
                generated_tokens += sum(len(part.token_ids) for part in output.outputs)
                finished = output.finished
                yield output
        finally:
            self._asked.pop(request_id, None)
            tokens = prompt_tokens + generated_tokens if finished else 0
            self.books.stops(key, tokens, turn.is_last or not turn.program)

    def look(self) -> None:
        """Tell of prompts that are computed though nothing came out yet: an answer that is not streamed comes
        when it is whole."""
        for state in self.output_processor.request_states.values():
            if (
                not state.is_prefilling
                and (asked := self._asked.pop(state.external_req_id, None)) is not None
            ):
                turn, body_bytes = asked
                self.books.first_token(turn, state.prompt_len, body_bytes)


def under_way(extra_args: Mapping[str, Any] | None, turn: TurnName) -> dict[str, Any] | None:
    """A request's fields with what its program did, as the fleet knows it and not as its client says."""
    kept = {name: value for name, value in (extra_args or {}).items() if name not in PROGRESS}
    if turn.turns:
        kept |= dict(zip(PROGRESS, (turn.turns, round(turn.age_s)), strict=True))
    return kept or None


async def started(words: list[str], books: Books) -> tuple[WatchedEngine, FastAPI]:
    """The engine and the app of `vllm serve WORDS`. Raises as vLLM does."""
    args = parsed(words)
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)
    engine = WatchedEngine.from_vllm_config(
        vllm_config=config,
        usage_context=UsageContext.OPENAI_API_SERVER,
        enable_log_requests=args.enable_log_requests,
        aggregate_engine_logging=args.aggregate_engine_logging,
        disable_log_stats=args.disable_log_stats,
    )
    assert isinstance(engine, WatchedEngine)
    engine.books, engine._asked = books, {}
    tasks = await engine.get_supported_tasks()
    app = build_app(args, tasks, engine.model_config)
    await init_app_state(engine, app.state, args, tasks)
    return engine, app


def parsed(words: list[str]) -> Namespace:
    """The words after `vllm serve`, read by its own parser. Raises ValueError, where it would exit."""
    parser = make_arg_parser(FlexibleArgumentParser(exit_on_error=False))  # type: ignore[no-untyped-call]
    try:
        args: Namespace = parser.parse_args(words)
    except SystemExit as error:
        raise ValueError(f"`vllm serve` does not take {' '.join(words)!r}: see the lines above") from error
    args.model = getattr(args, "model_tag", None) or args.model
    validate_parsed_serve_args(args)
    return args


def gpu_tokens(engine: AsyncLLM) -> int:
    """Tokens whose KV the engine has room for."""
    cache = engine.vllm_config.cache_config
    return int((cache.num_gpu_blocks or 0) * cache.block_size)
