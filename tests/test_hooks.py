"""The plugin wraps each function once, also if another plugin has wrapped it before."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

from continuum_lmcache.vllm_plugin.hooks import idle_timer, prometheus, request_fields, weight_updates

Install = Callable[[], None]
SEAMS = [  # module, class, method, what wraps it
    (
        "vllm.entrypoints.openai.chat_completion.protocol",
        "ChatCompletionRequest",
        "to_sampling_params",
        request_fields,
    ),
    (
        "vllm.entrypoints.openai.completion.protocol",
        "CompletionRequest",
        "to_sampling_params",
        request_fields,
    ),
    ("vllm.entrypoints.openai.responses.protocol", "ResponsesRequest", "to_sampling_params", request_fields),
    ("vllm.entrypoints.anthropic.serving", "AnthropicServingMessages", "create_messages", request_fields),
    ("vllm.v1.metrics.loggers", "StatLoggerManager", "record", prometheus),
    ("vllm.v1.engine.core", "EngineCoreProc", "_process_input_queue", idle_timer),
    ("vllm.v1.engine.core", "EngineCore", "collective_rpc", weight_updates),
]


def by_another_plugin(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def another(*args: Any, **kwargs: Any) -> Any:
        return stock(*args, **kwargs)

    return another


def layers(function: Callable[..., Any]) -> list[str]:
    """The modules of nested wrappers, the outermost first."""
    found = [function.__code__.co_filename]
    while (function := getattr(function, "__wrapped__", None)) is not None:  # type: ignore[assignment]
        found.append(function.__code__.co_filename)
    return found


@pytest.mark.parametrize(("module", "owner", "method", "ours"), SEAMS, ids=lambda value: str(value)[-30:])
@pytest.mark.parametrize("another_comes", ["never", "before", "between"])
def test_ours_is_installed_once_whatever_another_plugin_has_wrapped(
    module: str, owner: str, method: str, ours: Any, another_comes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls = getattr(import_module(module), owner)
    stock = getattr(cls, method)
    while hasattr(stock, "__wrapped__"):  # by an engine that another test built in this process
        stock = stock.__wrapped__
    monkeypatch.setattr(cls, method, by_another_plugin(stock) if another_comes == "before" else stock)
    ours.install()
    if another_comes == "between":
        monkeypatch.setattr(cls, method, by_another_plugin(getattr(cls, method)))
    ours.install()
    files = layers(getattr(cls, method))
    assert [name for name in files if "vllm_plugin" in name] == [ours.__file__]
    assert len(files) == (2 if another_comes == "never" else 3)
