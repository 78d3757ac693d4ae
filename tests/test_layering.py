"""Who may import whom: experiments -> connectors -> core <- vllm_plugin, console, serve. Held by a test."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLEET = sorted((ROOT / "continuum_lmcache" / "fleet").glob("*.py"))
CORE = [*sorted((ROOT / "continuum_lmcache").glob("*.py")), *FLEET]
PLUGIN = sorted((ROOT / "continuum_lmcache" / "vllm_plugin").glob("*.py"))
RECORDS = sorted((ROOT / "continuum_lmcache" / "records").glob("*.py"))
CONSOLE = sorted((ROOT / "continuum_lmcache" / "console").glob("*.py"))
SERVE = sorted((ROOT / "continuum_lmcache" / "serve").glob("*.py"))
CONSOLE_LIBRARIES = {"typer", "httpx", "yaml", "plotly", "rich", "prometheus_client"}
CONNECTORS = sorted((ROOT / "connectors").glob("*.py"))


def imported(path: Path, at_import: bool = False) -> Iterator[str]:
    """Modules that a file imports; `at_import`: those only that it needs to be imported itself."""
    tree = ast.parse(path.read_text())
    for node in [*tree.body] if at_import else ast.walk(tree):
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


def test_only_serve_imports_ray_and_only_its_engine_vllm() -> None:
    for path in [*CORE, *PLUGIN, *RECORDS, *CONSOLE, *CONNECTORS]:
        assert not any(
            name == "ray" or name.startswith(("ray.", "continuum_lmcache.serve")) for name in imported(path)
        ), path
    for path in SERVE:
        assert not tops(path) & {"lmcache", "connectors", "experiments"}, path
        assert not any("vllm_plugin" in name or "console" in name for name in imported(path)), path
        assert "vllm" not in tops(path) or path.name == "engine.py", path


def test_records_are_read_with_the_standard_library_and_the_core() -> None:
    for path in RECORDS:
        assert tops(path) <= sys.stdlib_module_names | {"continuum_lmcache"}, path
        assert not any("vllm_plugin" in name or "console" in name for name in imported(path)), path
        assert not tops(path) & {"time", "datetime", "socket", "threading"}, path


def test_the_console_asks_the_core_and_few_libraries_and_connectors_only_when_run() -> None:
    for path in CONSOLE:
        assert tops(path) <= sys.stdlib_module_names | CONSOLE_LIBRARIES | {"continuum_lmcache", "connectors"}
        assert "connectors" not in {name.partition(".")[0] for name in imported(path, at_import=True)}, path
        assert "connectors" not in tops(path) or path.name == "connector.py", path
        assert not any("vllm_plugin" in name for name in imported(path)), path


def test_the_console_starts_without_the_engines_and_the_plotting() -> None:
    """By what is really loaded: the doctor must run where no engine is installed."""
    heavy = {"vllm", "lmcache", "torch", "plotly", "connectors", "numpy"}
    code = f"import sys, continuum_lmcache.console.app; sys.exit(str({heavy!r} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.stderr.strip() == "set()"


def test_only_the_edges_know_of_the_console() -> None:
    for path in [*CORE, *PLUGIN, *CONNECTORS]:
        assert not any("console" in name or ".records" in name for name in imported(path)), path


def test_the_stock_scheduler_is_overridden_in_these_methods_only() -> None:
    """Each one more is a seam that the next vLLM may move (docs/decisions/0001)."""
    tree = ast.parse((ROOT / "continuum_lmcache/vllm_plugin/scheduler.py").read_text())
    mixin = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "ContinuumMixin")
    defined = {n.name for n in mixin.body if isinstance(n, ast.FunctionDef)}
    ours = {
        "_reorder",
        "_choose_chunk",
        "_may_cut_anywhere",
        "before_idle",
        "next_due_s",
        "_key",
        "_running_rank",
        "_compute_again",
        "_decoded",
    }
    assert defined - ours == {
        "__init__",
        "schedule",
        "add_request",
        "_free_request",
        "_update_after_schedule",
        "update_from_output",
        "_update_waiting_for_remote_kv",
        "_handle_invalid_blocks",
        "has_requests",
        "make_stats",
        "reset_prefix_cache",
        "shutdown",
        "_select_waiting_queue_for_scheduling",
    }
