"""Writes the tables that the code itself is the source of.    python -m experiments.reference

Between marks: in docs/metrics.md every metric, its type, labels and meaning; in docs/settings.md every
setting; in README.md those that a user chooses. A test checks that all are up to date.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import typer
from prometheus_client import Counter

from continuum_lmcache import config
from continuum_lmcache.config import ContinuumConfig
from continuum_lmcache.serve.scaling import TURNS
from continuum_lmcache.vllm_plugin.hooks.prometheus import METRICS
from experiments.tables import between, markdown

ROOT = Path(__file__).parents[1]
METRICS_PAGE = ROOT / "docs" / "metrics.md"
README = ROOT / "README.md"
SETTINGS_PAGE = ROOT / "docs" / "settings.md"
CHOSEN = (  # by a user; the others are seldom needed
    "policy",
    "profile",
    "longest_wait_s",
    "max_pinned_share",
    "max_tenant_share",
    "run_output_dir",
)
SETTINGS_MARKS = ("<!-- settings: python -m experiments.reference -->", "<!-- /settings -->")
METRICS_MARKS = ("<!-- metrics: python -m experiments.reference -->", "<!-- /metrics -->")


def metric_rows() -> list[tuple[str, str, str, str]]:
    """Every metric's name as Prometheus shows it, type, own labels, help."""
    rows = [
        (f"continuum_{key}{'_total' * (m.kind is Counter)}", m.kind.__name__.lower(), m.label, m.text)
        for key, m in METRICS.items()
    ]
    rows += [(f"{TURNS[0]}_total", "counter", "why", TURNS[1])]
    return sorted(rows)


def metrics_page() -> str:
    """docs/metrics.md. A counter's name ends in _total, and a histogram is named; the others are gauges."""
    rows = [
        [f"`{name}{label and f'{{{label}}}'}`", f"{text} (histogram)" if kind == "histogram" else text]
        for name, kind, label, text in metric_rows()
    ]
    return between(METRICS_PAGE.read_text(), METRICS_MARKS, markdown([["metric", ""], *rows], "---"))


def settings_table(names: Sequence[str]) -> str:
    """Key, default, and the comment beside it in config.py."""
    meanings, defaults = comments(), {field.name: field.default for field in fields(ContinuumConfig)}
    rows = [["key", "default", ""]]
    for name in names:
        default = defaults[name]
        shown = str(default).lower() if isinstance(default, bool) else f"{default}"
        rows.append([f"`{name}`", shown and f"`{shown}`", meanings[name]])
    return markdown(rows, "---")


def comments() -> dict[str, str]:
    """The comment beside each field in config.py."""
    source = Path(config.__file__).read_text()
    lines = source.splitlines()
    tree = next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef))
    found = {}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = lines[node.lineno - 1].partition("  # ")[2]
    return found


def readme() -> str:
    """README.md with the settings that a user chooses."""
    return between(README.read_text(), SETTINGS_MARKS, settings_table(CHOSEN))


def settings_page() -> str:
    """docs/settings.md with all settings."""
    every = [field.name for field in fields(ContinuumConfig)]
    return between(SETTINGS_PAGE.read_text(), SETTINGS_MARKS, settings_table(every))


def main() -> None:
    """Write docs/metrics.md and the tables of settings."""
    METRICS_PAGE.write_text(metrics_page())
    SETTINGS_PAGE.write_text(settings_page())
    README.write_text(readme())


if __name__ == "__main__":
    typer.run(main)
