"""The import rules, checked by tests.

types, config, errors <- tools, reload, steps <- policy, programs <- admission, telemetry, retention
    <- capacity, engine
experiments -> connectors -> core <- vllm_plugin, console, report, recordings
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "continuum_lmcache"
BASE = {"types", "config", "errors", "bounded_dict"}
CORE = {  # a package of the core -> the others that it may import, beside BASE
    "tools": set(),
    "reload": set(),
    "steps": set(),
    "policy": {"tools", "reload", "steps"},
    "programs": {"tools"},
    "admission": {"programs", "policy"},
    "telemetry": {"programs"},
    "retention": {"tools", "programs", "reload"},
    "capacity": {"tools", "reload", "policy", "telemetry"},
    "fleet": set(),
}
CORE_FILES = sorted(
    [*PACKAGE.glob("*.py"), *(path for name in CORE for path in (PACKAGE / name).rglob("*.py"))]
)
PLUGIN = sorted((PACKAGE / "vllm_plugin").rglob("*.py"))
SERVE = sorted((PACKAGE / "serve").rglob("*.py"))
RECORDINGS = sorted((PACKAGE / "recordings").rglob("*.py"))
CONSOLE = sorted([*(PACKAGE / "console").rglob("*.py"), *(PACKAGE / "report").rglob("*.py")])
CONSOLE_LIBRARIES = {"typer", "httpx", "yaml", "plotly", "rich", "prometheus_client"}
CONSOLE_LIBRARIES |= {"transformers", "huggingface_hub"}  # beside vLLM alone
CONNECTORS = sorted((ROOT / "connectors").rglob("*.py"))
MOST_FILES = 12  # of a folder of the product, its __init__ among them


@functools.cache
def imported(path: Path, at_import: bool = False) -> frozenset[str]:
    """Modules that a file imports; `at_import`: those only that it needs to be imported itself."""
    tree, found = ast.parse(path.read_text()), set[str]()
    for node in [*tree.body] if at_import else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module or "")
    return frozenset(found)


def tops(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported(path)}


def parts(path: Path) -> set[str]:
    """The packages and top-level modules of continuum_lmcache that a file imports."""
    return {name.split(".")[1] for name in imported(path) if name.startswith("continuum_lmcache.")}


def test_the_core_imports_the_standard_library_and_itself() -> None:
    for path in CORE_FILES:
        assert tops(path) <= sys.stdlib_module_names | {"continuum_lmcache"}, path
        assert parts(path) <= CORE.keys() | BASE, path


def test_each_package_of_the_core_imports_only_those_below_it() -> None:
    for name, below in CORE.items():
        for path in (PACKAGE / name).rglob("*.py"):
            assert parts(path) <= below | BASE | {name}, path
    for path in PACKAGE.glob("*.py"):
        assert parts(path) <= (BASE | CORE.keys() if path.name == "engine.py" else BASE), path


def test_the_packages_of_the_core_can_be_put_in_an_order() -> None:
    left = dict(CORE)
    while ready := [name for name, below in left.items() if not below & left.keys()]:
        for name in ready:
            del left[name]
    assert not left, f"these import one another: {sorted(left)}"


def test_the_core_has_no_clock_and_no_files() -> None:
    for path in CORE_FILES:
        assert not tops(path) & {"time", "datetime", "os", "pathlib", "socket", "threading"}, path


def test_only_the_plugin_and_the_connectors_import_vllm_and_only_connectors_lmcache() -> None:
    for path in PLUGIN:
        assert not tops(path) & {"lmcache", "connectors", "experiments"}, path
        assert not parts(path) & {"console", "report", "recordings", "capacity"}, path
    for path in CONNECTORS:
        names = list(imported(path))
        assert not any("vllm_plugin" in name for name in names), path
        assert not tops(path) & {"experiments"}, path
        is_ours = path.is_relative_to(ROOT / "connectors" / "lmcache_mp")
        assert "lmcache" not in tops(path) or is_ours, path


def test_serve_alone_imports_ray_and_leaves_vllm_to_the_plugin() -> None:
    for path in SERVE:
        assert not tops(path) & {"vllm", "lmcache", "experiments"}, path
        assert not parts(path) & {"console", "report", "recordings", "capacity"}, path
    for path in {*PACKAGE.rglob("*.py"), *CONNECTORS} - {*SERVE}:
        assert "ray" not in tops(path) and "serve" not in parts(path), path


def test_the_packages_of_connectors_are_imported_without_the_engines() -> None:
    """The doctor reads LMCache's settings where neither is installed."""
    path = ROOT / "connectors" / "lmcache_mp" / "__init__.py"
    found = {top.partition(".")[0] for top in imported(path, at_import=True)}
    assert not found - {"__future__", "typing"}


def test_recordings_are_read_with_the_standard_library_and_the_core() -> None:
    for path in RECORDINGS:
        assert tops(path) <= sys.stdlib_module_names | {"continuum_lmcache"}, path
        assert parts(path) <= CORE.keys() | BASE | {"recordings"}, path
        assert not tops(path) & {"time", "datetime", "socket", "threading"}, path


def test_the_console_asks_the_core_and_few_libraries_and_connectors_only_when_run() -> None:
    for path in CONSOLE:
        assert tops(path) <= sys.stdlib_module_names | CONSOLE_LIBRARIES | {"continuum_lmcache", "connectors"}
        assert "connectors" not in {name.partition(".")[0] for name in imported(path, at_import=True)}, path
        assert "connectors" not in tops(path) or path.name == "lmcache_check.py", path
        assert "vllm_plugin" not in parts(path), path


def test_the_console_starts_without_the_engines_and_the_plotting() -> None:
    """By the modules that are really loaded: the doctor must run without an engine."""
    heavy = {"vllm", "lmcache", "torch", "plotly", "connectors", "numpy"}
    code = f"import sys, continuum_lmcache.console.app; sys.exit(str({heavy!r} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ran.stderr.strip() == "set()"


def test_only_the_edges_know_of_the_console() -> None:
    for path in [*CORE_FILES, *PLUGIN, *CONNECTORS]:
        assert not parts(path) & {"console", "report", "recordings"}, path


def test_what_a_module_imports_of_another_is_there_within_its_functions_too() -> None:
    """No type checker reads the experiments, and a stage for a card imports what it needs when it runs."""
    missing = []
    for path in [*PACKAGE.rglob("*.py"), *CONNECTORS, *(ROOT / "experiments").rglob("*.py")]:
        nodes = ast.walk(ast.parse(path.read_text()))
        for node in (each for each in nodes if isinstance(each, ast.ImportFrom) and each.module):
            place = ROOT.joinpath(*str(node.module).split("."))
            for module in (place.with_suffix(".py"), place / "__init__.py"):
                if module.exists():
                    there = names_of(module) | {beside.stem for beside in place.glob("*")}
                    gone = {alias.name for alias in node.names} - there
                    missing += [f"{path.relative_to(ROOT)}: {node.module}.{name}" for name in gone]
    assert not missing


@functools.cache
def names_of(path: Path) -> set[str]:
    """What a module has once it is imported."""
    found, nodes = {"*"}, [*ast.parse(path.read_text()).body]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
            continue
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        nodes += ast.iter_child_nodes(node)
    return found


def test_no_class_of_the_product_has_the_name_of_another() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in [*PACKAGE.rglob("*.py"), *CONNECTORS]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert not {name: where for name, where in places.items() if len(where) > 1}


def test_no_folder_of_the_product_is_too_long_to_be_read_at_a_glance() -> None:
    folders = [path for top in (PACKAGE, ROOT / "connectors") for path in (top, *top.rglob("*"))]
    for folder in folders:
        assert len(list(folder.glob("*.py"))) <= MOST_FILES, folder


def test_the_stock_scheduler_is_overridden_in_these_methods_only() -> None:
    """Each further one is a seam that the next vLLM may change (the head of scheduler.py)."""
    tree = ast.parse((ROOT / "continuum_lmcache/vllm_plugin/scheduler.py").read_text())
    mixin = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "ContinuumMixin")
    defined = {n.name for n in mixin.body if isinstance(n, ast.FunctionDef)}
    ours = {
        "_reorder",
        "_choose_chunk",
        "idle_s",
        "on_new_weights",
        "on_adapter",
        "on_release",
        "_forget_loaded",
        "_hold_no_memory",
        "next_due_s",
        "_decoding",
    }
    assert defined - ours == {
        "__init__",
        "schedule",
        "add_request",
        "_free_request",
        "_free_blocks",
        "_update_after_schedule",
        "update_from_output",
        "_update_waiting_for_remote_kv",
        "has_requests",
        "make_stats",
        "reset_prefix_cache",
        "shutdown",
        "_select_waiting_queue_for_scheduling",
    }


OF_VLLM = {"self._manager", "self._scheduler", "self.output_processor", "self.vllm_config"}
VALUES = {"costs", "policy"}  # frozen: no owner's
OF_CONTAINERS = {"add", "clear", "discard", "get", "items", "values"}


def test_the_plugin_asks_nobody_for_what_another_one_owns() -> None:
    """`self.a.b.c`: a file that knows what `a` owns, and what that owns, changes with both."""
    found = [
        f"{path.name}:{node.lineno} {chain}"
        for path in PLUGIN
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and len(names := (chain := ast.unparse(node)).split(".")) > 3
        and all(name.isidentifier() for name in names)
        and not {".".join(names[:2])} & OF_VLLM
        and not {*names[2:-1]} & VALUES
        and node.attr not in OF_CONTAINERS
    ]
    assert not found


def by_process() -> dict[str, set[Path]]:
    """The product's files that ARCHITECTURE.md says run in a process, by its first word. A name stands in the
    folder that was named last."""
    rows, folder = {}, ROOT
    for row in re.findall(r"^\| (.*?) \| (.*) \|$", (ROOT / "ARCHITECTURE.md").read_text(), re.M)[1:7]:
        rows[row[0].split()[0]] = found = set[Path]()
        for name in re.findall(r"`([\w./]+)`", row[1]):
            folders = (ROOT, PACKAGE, folder, folder.parent)
            path = next((each / name for each in folders if (each / name).exists()), None)
            assert path is not None, f"{name} of {row[0]} is nowhere"
            found |= {*path.rglob("*.py")} if path.is_dir() else {path}
            folder = path if path.is_dir() else folder
    return rows


def test_the_architecture_says_in_which_process_each_part_runs() -> None:
    """Each file has a process. Nothing that runs beside the scheduler imports its engine."""
    rows = by_process()
    assert list(rows) == ["vLLM's", "API", "workers,", "LMCache's", "the", "Ray"]
    named = set().union(*rows.values())
    left_out = {path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"} - named
    assert {path.name for path in left_out} <= {f"{name}.py" for name in (*BASE, "connector_names")}
    hooks = {path for path in (PACKAGE / "vllm_plugin" / "hooks").glob("*.py") if path in rows["API"]}
    assert {"request_fields.py", "http_fields.py", "api_keys.py"} <= {path.name for path in hooks}
    for process in ("API", "workers,", "LMCache's", "the"):
        for path in rows[process]:
            assert "continuum_lmcache.engine" not in imported(path), f"{path} runs beside no scheduler"
