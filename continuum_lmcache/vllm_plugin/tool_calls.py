"""Reads which tools a finished turn called: by vLLM's own parser, where the server has one, else by ours.

vLLM's parsers live in its API server, which reads a turn after the engine has decided about its KV. So the
engine has one of its own, for what clients get as calls: turns of requests that offer tools.

Seams, read in vLLM 0.32: ToolParserManager.get_tool_parser, ToolParser.extract_tool_calls (a parser keeps
nothing between two calls); Request.output_token_ids, SamplingParams.all_stop_token_ids. In a parser of
vLLM's parser engine: _parser_engine._stream_arg_deltas, _parser_engine._engine.config.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.logger import init_logger
from vllm.tool_parsers import ToolParser, ToolParserManager
from vllm.v1.request import Request

from continuum_lmcache.tools.call_parser import (
    MAX_CALLS,
    MAX_CHARS,
    TAIL_TOKENS,
    call,
    is_answer,
    tool_calls,
    without_thinking,
)
from continuum_lmcache.types import NO_CALL, ToolKey

logger = init_logger("vllm.continuum_lmcache")
ANY_REQUEST = ChatCompletionRequest(messages=[], seed=None)  # without tools, so each name is taken as it is
ANY_REQUEST.tool_choice = "auto"  # which vLLM refuses without tools


class ToolCallReader:
    """One engine's reader. `name`: of vLLM's parser, "" is none; `plugin`: a file that registers it."""

    def __init__(self, tokenizer: Any, name: str = "", plugin: str = "") -> None:
        # it decodes in half of the wrapper's time
        self._tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
        self._parser: ToolParser | None = None
        self.source = "JSON, XML or a bash block: there is no --tool-call-parser"
        if not name or tokenizer is None:
            return
        self.source = f"vLLM's parser {name}"
        with any_error() as errors:
            if plugin:
                ToolParserManager.import_tool_parser(plugin)
            self._parser = whole_arguments(ToolParserManager.get_tool_parser(name)(tokenizer))
            self._parser.extract_tool_calls("", ANY_REQUEST)
        if errors:  # of gpt-oss and Cohere the class has no code for a text
            self._parser = None
            self.source = f"JSON, XML or gpt-oss; vLLM's parser {name} cannot be used: {errors[0]!r:.200}"

    def read(self, request: Request, offers_tools: bool, ignored: Counter[str]) -> tuple[ToolKey, ...]:
        """The keys of the turn's calls; NO_CALL alone for an answer, () where neither can be told."""
        text = without_thinking(self._tail(request, ignored)[-MAX_CHARS:])
        calls: tuple[ToolKey, ...] = ()
        if offers_tools and self._parser is not None:
            with any_error(ignored, f"{type(self._parser).__name__}.extract_tool_calls"):
                found = self._parser.extract_tool_calls(text.strip("\n"), ANY_REQUEST).tool_calls[:MAX_CALLS]
                names = ((one.function.name, one.function.arguments) for one in found)
                calls = tuple(key for name, arguments in names for key in call(name, arguments))
        return calls or tool_calls(text, offers_tools) or ((NO_CALL,) if is_answer(text) else ())

    def _tail(self, request: Request, ignored: Counter[str]) -> str:
        """The end of what the turn generated, as text; empty without a tokenizer, or where it fails.

        A model's padded vocabulary has tokens that its tokenizer does not know, and clients can ask for them.
        Tokenizers raise KeyError, IndexError, ValueError or TypeError then, and those in Rust may panic.
        """
        ids: Sequence[int] = request.output_token_ids[-TAIL_TOKENS:]
        params = request.sampling_params
        if ids and params is not None and ids[-1] in params.all_stop_token_ids:
            ids = ids[:-1]  # as in the text that vLLM's own parser gets
        if self._tokenizer is None or not ids:
            return ""
        with any_error(ignored, f"{type(self._tokenizer).__name__}.decode"):
            return str(self._tokenizer.decode(ids, skip_special_tokens=False))
        return ""


@contextmanager
def any_error(ignored: Counter[str] | None = None, what: str = "") -> Iterator[list[BaseException]]:
    """Go on after whatever a tokenizer or a parser raises: a model's own is any code. Rust may panic."""
    errors: list[BaseException] = []
    try:
        yield errors
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        errors.append(error)
        if ignored is not None:
            ignored["output_token_ids"] += 1
            name = type(error).__name__
            logger.warning_once("A turn's tool is not known: %s raised %s (logged once)", what, name)


def whole_arguments(parser: ToolParser) -> ToolParser:
    """Have a parser of vLLM's parser engine take each argument whole.

    It makes a stream's part of each character, and converts all arguments so far for each part: a call of
    2 kB takes up to a second.
    """
    engine = getattr(parser, "_parser_engine", None)
    if engine is not None:
        engine._stream_arg_deltas = False
        engine._engine.config = replace(engine._engine.config, tool_args_json=False)
    return parser
