"""Who may import whom: experiments -> connectors -> core <- vllm_plugin. Structure, held by a test."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORE = sorted((ROOT / "continuum_lmcache").glob("*.py"))
PLUGIN = sorted((ROOT / "continuum_lmcache" / "vllm_plugin").glob("*.py"))
CONNECTORS = sorted((ROOT / "connectors").glob("*.py"))


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or ""


def tops(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported(path)}


def test_the_core_imports_the_standard_library_and_itself() -> None:
    for path in CORE:
        assert tops(path) <= sys.stdlib_module_names | {"continuum_lmcache"}, path
        assert not any("vllm_plugin" in name for name in imported(path)), path


def test_the_core_has_no_clock_and_no_files() -> None:
    for path in CORE:
        assert not tops(path) & {"time", "datetime", "os", "pathlib", "socket", "threading"}, path


def test_only_the_plugin_and_the_connectors_import_vllm_and_only_connectors_lmcache() -> None:
    for path in PLUGIN:
        assert not tops(path) & {"lmcache", "connectors", "experiments"}, path
    for path in CONNECTORS:
        names = list(imported(path))
        assert not any("vllm_plugin" in name for name in names), path
        assert not tops(path) & {"experiments"}, path
        assert "lmcache" not in tops(path) or path.name.startswith("lmcache"), path


def test_the_stock_scheduler_is_overridden_in_these_methods_only() -> None:
    """Each one more is a seam that the next vLLM may move (docs/decisions/0001)."""
    tree = ast.parse((ROOT / "continuum_lmcache/vllm_plugin/scheduler.py").read_text())
    mixin = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "ContinuumMixin")
    defined = {n.name for n in mixin.body if isinstance(n, ast.FunctionDef)}
    ours = {"_reorder", "before_idle", "_key", "_running_rank"}
    assert defined - ours == {
        "__init__",
        "schedule",
        "add_request",
        "_free_request",
        "_update_after_schedule",
        "update_from_output",
        "has_requests",
        "make_stats",
        "reset_prefix_cache",
        "shutdown",
        "_select_waiting_queue_for_scheduling",
    }


def test_no_file_of_the_package_passes_300_lines() -> None:
    for path in [*CORE, *PLUGIN, *CONNECTORS]:
        assert len(path.read_text().splitlines()) <= 300, path
