"""vLLM's engine and vLLM's own OpenAI and Anthropic app in this process, with each prompt watched.

No part of vLLM's server is rewritten: its parser reads the options, its AsyncLLM runs the engine, its
build_app and init_app_state make the app. The engine is observed where prompts enter and results leave.

Seams, read and run on vLLM 0.32, and refused on any other: entrypoints.launchers
(cli_args.make_arg_parser, .validate_parsed_serve_args, app.build_app, api_server.app_state.init_app_state);
AsyncLLM.generate, .from_vllm_config, .get_supported_tasks, .model_config,
.output_processor.request_states (is_prefilling, external_req_id).
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import AsyncGenerator, Callable
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.outputs import RequestOutput
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM

from continuum_lmcache.errors import ConfigError
from continuum_lmcache.vllm_plugin.hooks.engine_args import SCHEDULERS

CHECKED_VERSION = "0.32"
Watch = Callable[[Any, str], Callable[[bool], None]]
"""Gets each prompt that enters: its sampling parameters, which may be changed, and its request's id. What it
returns is called when the generation has ended, with whether that is complete."""


class WatchedEngine(AsyncLLM):
    """vLLM's engine."""

    watch: Watch
    _began_s: dict[str, float]  # by request id: when its prompt entered

    @property
    def wait_s(self) -> float | None:
        """How long the prompt has waited that has waited longest for its first token, seconds. None: our own
        scheduler, which admits programs."""
        if str(self.vllm_config.scheduler_config.scheduler_cls).startswith(SCHEDULERS):
            return None
        now_s, states = time.monotonic(), self.output_processor.request_states.values()
        waiting = [state.external_req_id for state in states if state.is_prefilling]
        return now_s - min((self._began_s.get(name, now_s) for name in waiting), default=now_s)

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **more: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """AsyncLLM.generate, watched."""
        stopped = self.watch(sampling_params, request_id)
        self._began_s[request_id] = time.monotonic()
        finished = False
        try:
            async for output in super().generate(prompt, sampling_params, request_id, **more):
                finished = output.finished
                yield output
        finally:
            self._began_s.pop(request_id, None)
            stopped(finished)


async def started(words: list[str], watch: Watch) -> tuple[WatchedEngine, FastAPI]:
    """The engine and the app of `vllm serve WORDS`. Raises ConfigError on an unchecked vLLM."""
    refuse_unchecked(version("vllm"))
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app

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
    engine.watch, engine._began_s = watch, {}
    tasks = await engine.get_supported_tasks()
    app = build_app(args, tasks, engine.model_config)
    await init_app_state(engine, app.state, args, tasks)
    return engine, app


def refuse_unchecked(found: str) -> None:
    """Raise ConfigError unless this file was run with this vLLM's internals."""
    if not found.startswith(f"{CHECKED_VERSION}."):
        raise ConfigError(f"vLLM {found}: a replica under Ray Serve needs {CHECKED_VERSION}")


def parsed(words: list[str]) -> Namespace:
    """The arguments after `vllm serve`, read by its own parser. Raises ValueError where that would exit."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args

    parser = make_arg_parser(FlexibleArgumentParser(exit_on_error=False))  # type: ignore[no-untyped-call]
    try:
        args: Namespace = parser.parse_args(words)
    except SystemExit as error:
        raise ValueError(f"`vllm serve` does not take {' '.join(words)!r}: see the lines above") from error
    args.model = getattr(args, "model_tag", None) or args.model
    validate_parsed_serve_args(args)
    return args
