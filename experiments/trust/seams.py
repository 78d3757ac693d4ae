"""What changed between two releases of vLLM in the functions that this plugin overrides, wraps or calls.

    python -m experiments.trust.seams 0.32.0 0.33.0

`python -m experiments.trust.version_matrix` then runs our tests on a version. pip gets the wheels.
"""

from __future__ import annotations

import ast
import difflib
import sys
from collections.abc import Mapping
from pathlib import Path

from experiments.trust.packages import unpacked

SCHEDULER = (
    *("schedule", "add_request", "_free_request", "_update_after_schedule", "update_from_output"),
    *("_update_waiting_for_remote_kv", "has_requests", "make_stats", "reset_prefix_cache", "shutdown"),
    *("_preempt_request", "reset_connector_cache"),
)
SEAMS: Mapping[str, Mapping[str, tuple[str, ...]]] = {  # by file and class; "": functions of the file
    "v1/core/sched/scheduler.py": {"Scheduler": SCHEDULER},
    "v1/core/sched/async_scheduler.py": {"AsyncScheduler": ("_update_after_schedule",)},
    "v1/core/kv_cache_manager.py": {"KVCacheManager": ("allocate_slots", "get_computed_blocks", "free")},
    "v1/core/block_pool.py": {"BlockPool": ("touch", "free_blocks", "get_new_blocks", "reset_prefix_cache")},
    "v1/core/kv_cache_utils.py": {"": ("_gen_lora_extra_hash_keys",)},
    "v1/engine/core.py": {
        "EngineCore": ("collective_rpc", "add_lora", "remove_lora", "set_weight_version"),
        "EngineCoreProc": ("_process_input_queue",),
    },
    "v1/engine/core_client.py": {
        "DPLBAsyncMPClient": ("get_core_engine_for_request", "call_utility_async"),
    },
    "v1/engine/async_llm.py": {"AsyncLLM": ("add_request",)},
    "v1/metrics/loggers.py": {"StatLoggerManager": ("record",)},
    "engine/arg_utils.py": {"EngineArgs": ("add_cli_args", "from_cli_args", "create_engine_config")},
    "entrypoints/cli/serve.py": {"": ("run_multi_api_server", "run_headless")},
    "entrypoints/openai/chat_completion/protocol.py": {"ChatCompletionRequest": ("to_sampling_params",)},
    "entrypoints/openai/completion/protocol.py": {"CompletionRequest": ("to_sampling_params",)},
    "entrypoints/openai/responses/protocol.py": {"ResponsesRequest": ("to_sampling_params",)},
    "entrypoints/anthropic/serving.py": {"AnthropicServingMessages": ("create_messages",)},
    "entrypoints/openai/models/serving.py": {"OpenAIServingModels": ("load_lora_adapter",)},
}


def source_of(text: str, owner: str, name: str) -> list[str]:
    """A function's lines without its comments and types' spelling; none: it is not there."""
    tree: ast.AST = ast.parse(text)
    if owner:
        classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == owner)
        tree = next(classes, ast.Module([], []))
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return ast.unparse(node).splitlines()
    return []


def changes(old: Path, new: Path) -> dict[str, list[str]]:
    """The diff of each seam that changed, by its name; of folders that hold vllm/."""
    found = {}
    for file, owners in SEAMS.items():
        before, after = ((root / "vllm" / file) for root in (old, new))
        texts = [path.read_text() if path.exists() else "" for path in (before, after)]
        for owner, name in ((owner, name) for owner, names in owners.items() for name in names):
            a, b = (source_of(text, owner, name) for text in texts)
            if a != b or not a:
                found[f"{file}: {owner}.{name}".replace(": .", ": ")] = list(
                    difflib.unified_diff(a, b, lineterm="", n=1)
                ) or ["in neither"]
    return found


def main(old: str, new: str) -> None:
    found = changes(*(unpacked("vllm", version) for version in (old, new)))
    for name, lines in found.items():
        print(f"\n## {name}", *lines, sep="\n")
    total = sum(len(names) for owners in SEAMS.values() for names in owners.values())
    print(f"\n{len(found)} of {total} functions changed from {old} to {new}:", *found, sep="\n  ")


if __name__ == "__main__":
    main(*sys.argv[1:3])
