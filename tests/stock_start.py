"""Starts vLLM with one of its own policies in a new process, and prints as JSON what this package changed."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any

from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins

SEAMS = {
    "EngineCoreProc._process_input_queue": "vllm.v1.engine.core",
    "StatLoggerManager.record": "vllm.v1.metrics.loggers",
    "ChatCompletionRequest.to_sampling_params": "vllm.entrypoints.openai.chat_completion.protocol",
    "CompletionRequest.to_sampling_params": "vllm.entrypoints.openai.completion.protocol",
    "ResponsesRequest.to_sampling_params": "vllm.entrypoints.openai.responses.protocol",
    "AnthropicServingMessages.create_messages": "vllm.entrypoints.anthropic.serving",
}


def function(name: str) -> Any:
    owner, method = name.split(".")
    return getattr(getattr(import_module(SEAMS[name]), owner), method)


def start(model: str, policy: str, connector: str) -> dict[str, Any]:
    """Start with a setting that our connector refuses, and vLLM and LMCache do not."""
    transfer = KVTransferConfig(
        kv_connector=connector, kv_role="kv_both", kv_connector_extra_config={"lmcache.chunk_siz": 1}
    )
    args = EngineArgs(model=model, dtype="bfloat16", scheduling_policy=policy, kv_transfer_config=transfer)
    config = args.create_engine_config()
    found = config.kv_transfer_config
    return {
        "connector": [found.kv_connector, found.kv_connector_module_path, found.kv_connector_extra_config],
        "load_failure_policy": found.kv_load_failure_policy,
        "scheduler": config.scheduler_config.get_scheduler_cls().__module__,
    }


if __name__ == "__main__":
    before = {name: function(name) for name in SEAMS}
    load_general_plugins()
    kinds = ("LMCacheConnectorV1", "LMCacheMPConnector")
    starts = [start(sys.argv[1], policy, kind) for policy in ("fcfs", "priority") for kind in kinds]
    wrapped = [name for name, stock in before.items() if function(name) is not stock]
    ours = [name for name in sys.modules if name.split(".")[0] == "connectors"]
    print(json.dumps({"starts": starts, "wrapped": wrapped, "connectors": ours}))
