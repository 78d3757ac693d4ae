"""Writes the tables that the code itself is the source of.    python -m experiments.reference

docs/metrics.md: every metric, its type, labels and meaning. Between marks: every setting in docs/settings.md,
and those that a user chooses in README.md. A test checks that all are up to date.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import typer
from prometheus_client import Counter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python PATH` as well as -m

from continuum_lmcache import config
from continuum_lmcache.config import ContinuumConfig
from continuum_lmcache.serve.gauges import TURNS, WAIT
from continuum_lmcache.vllm_plugin.hooks.prometheus import METRICS

ROOT = Path(__file__).parents[1]
METRICS_PAGE = ROOT / "docs" / "metrics.md"
README = ROOT / "README.md"
SETTINGS_PAGE = ROOT / "docs" / "settings.md"
CHOSEN = (  # by a user; the others are seldom needed
    "policy",
    "profile",
    "admission_max_hold_s",
    "max_pinned_share",
    "max_tenant_share",
    "run_output_dir",
)
SETTINGS_MARKS = ("<!-- settings: python -m experiments.reference -->", "<!-- /settings -->")
INTRODUCTION = """\
# Metrics

Written by `python -m experiments.reference`. All of them are in vLLM's own `/metrics` and carry the label
`engine`. They begin with the engine's first step. Units are base units, in the name. With
`--disable-log-stats` none is reported.

A label `tier` is `gpu`, `dram`, `ssd` or `none` (computed). No label has text of a client: gaps and TTLs by
tool are in [recordings](recording.md).

Each event is reported once, to the API server of vLLM that gets the step's statistics. So with
`--api-server-count` above 1 Prometheus' sums over their processes are right. While the engine is
busy the figures are up to half a second old.

Only replicas of a fleet on Ray Serve report `continuum_fleet_*`, without the label `engine`. All metrics of a
replica are at `/metrics?replica=N` ([ray.md](ray.md)).

[docs/grafana/continuum.json](grafana/continuum.json) is a dashboard of one server on one screen: import it in
Grafana and choose the Prometheus. It was not tried in Grafana: a real Prometheus ran its queries on a real
server. [docs/grafana/alerts.yaml](grafana/alerts.yaml) has rules for alerts.

| metric | type | labels | |
|---|---|---|---|
"""


def metric_rows() -> list[tuple[str, str, str, str]]:
    """Every metric's name as Prometheus shows it, type, own labels, help."""
    rows = [
        (f"continuum_{key}{'_total' * (m.kind is Counter)}", m.kind.__name__.lower(), m.label, m.text)
        for key, m in METRICS.items()
    ]
    rows += [(f"{TURNS[0]}_total", "counter", "why", TURNS[1]), (WAIT[0], "gauge", "", WAIT[1])]
    return sorted(rows)


def metrics_page() -> str:
    """docs/metrics.md."""
    return INTRODUCTION + "".join(
        f"| `{name}` | {kind} | {f'`{label}`' if label else ''} | {text} |\n"
        for name, kind, label, text in metric_rows()
    )


def settings_table(names: Sequence[str]) -> str:
    """Key, default, and the comment beside it in config.py."""
    meanings, defaults = comments(), {field.name: field.default for field in fields(ContinuumConfig)}
    rows = ["| key | default | |", "|---|---|---|"]
    for name in names:
        default = defaults[name]
        shown = str(default).lower() if isinstance(default, bool) else f"{default}"
        rows.append(f"| `{name}` | {f'`{shown}`' if shown else ''} | {meanings[name]} |")
    return "\n".join(rows)


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


def between(page: str, marks: tuple[str, str], table: str) -> str:
    """The page with that table between those marks."""
    before, _, rest = page.partition(marks[0])
    after = rest.partition(marks[1])[2]
    return f"{before}{marks[0]}\n{table}\n{marks[1]}{after}"


def main() -> None:
    """Write docs/metrics.md and the tables of settings."""
    METRICS_PAGE.write_text(metrics_page())
    SETTINGS_PAGE.write_text(settings_page())
    README.write_text(readme())


if __name__ == "__main__":
    typer.run(main)
