"""Writes the tables that the code itself is the source of.    python -m experiments.reference

docs/metrics.md: every metric, its type, labels and meaning. README.md, between marks: every setting, and
the table of docs/versions.md (experiments/trust/version_matrix.py). A test holds that both are up to date.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python PATH` as well as -m

import connectors.lmcache_meter as meter
from continuum_lmcache import config
from continuum_lmcache.config import ContinuumConfig
from continuum_lmcache.vllm_plugin.metrics import COUNTERS, GAUGES, HISTOGRAMS

ROOT = Path(__file__).parents[1]
METRICS_PAGE = ROOT / "docs" / "metrics.md"
README = ROOT / "README.md"
VERSIONS = ROOT / "docs" / "versions.md"
SETTINGS_MARKS = ("<!-- settings: python -m experiments.reference -->", "<!-- /settings -->")
VERSIONS_MARKS = ("<!-- versions: python -m experiments.reference -->", "<!-- /versions -->")
INTRODUCTION = """\
# Metrics

Written by `python -m experiments.reference`. All of them are in vLLM's own `/metrics` and carry the label
`engine`; those of loads and stores come from the LMCache connector, under any scheduling policy, with vLLM's
labels `model_name` and `engine`. The others begin with the engine's first step. Units are base units, in the
name. Nothing is told with `--disable-log-stats`.

A label `tool` is the program that a shell ran, else the tool's name: at most 20 of them, those seen three
times first, cut to 40 plain characters; the rest is `other`, a turn without a known call `unknown`. `tier` is
`gpu`, `dram`, `ssd` or `none` (computed).

Each event is told once, to whichever of vLLM's API servers gets the step's statistics, so with
`--api-server-count` above 1 Prometheus' sums over their processes are right. While the engine is
busy the figures are up to half a second old.

[docs/grafana/continuum.json](grafana/continuum.json) is a dashboard of one server on one screen: import it in
Grafana and choose the Prometheus. It was not seen in a Grafana: its queries were run by a real Prometheus
over a real server, and matplotlib drew what came back (`python -m experiments.dashboard watch`, the demo's
programs on two CPU cores):

![what the panels show](grafana/dashboard.png)

| metric | type | labels | |
|---|---|---|---|
"""


def metric_rows() -> list[tuple[str, str, str, str]]:
    """Every metric's name as Prometheus shows it, type, own labels, help."""
    rows = [(f"{name}_total", "counter", label, text) for name, text, label in COUNTERS.values()]
    rows += [(name, "gauge", label, text) for name, text, label in GAUGES.values()]
    rows += [(name, "histogram", label, text) for name, text, label, _ in HISTOGRAMS.values()]
    for name, text in meter.COUNTERS.items():
        label = meter.LABELS.get(name, "")
        rows.append((f"continuum_{name}_total", "counter", label, text.removesuffix(".")))
    return sorted(rows)


def metrics_page() -> str:
    """docs/metrics.md."""
    return INTRODUCTION + "".join(
        f"| `{name}` | {kind} | {f'`{label}`' if label else ''} | {text} |\n"
        for name, kind, label, text in metric_rows()
    )


def settings_table() -> str:
    """The README's table: key, default, and the comment beside it in config.py."""
    said = comments()
    rows = ["| key | default | |", "|---|---|---|"]
    for field in fields(ContinuumConfig):
        assert field.default is not MISSING
        shown = str(field.default).lower() if isinstance(field.default, bool) else f"{field.default}"
        rows.append(f"| `{field.name}` | {f'`{shown}`' if shown else ''} | {said[field.name]} |")
    return "\n".join(rows)


def comments() -> dict[str, str]:
    """What config.py says beside each field."""
    source = Path(config.__file__).read_text()
    lines = source.splitlines()
    tree = next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef))
    found = {}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = lines[node.lineno - 1].partition("  # ")[2]
    return found


def versions_table() -> str:
    """The table of docs/versions.md."""
    return "\n".join(line for line in VERSIONS.read_text().splitlines() if line.startswith("|"))


def readme() -> str:
    """README.md with both tables as they should be."""
    page = between(README.read_text(), SETTINGS_MARKS, settings_table())
    return between(page, VERSIONS_MARKS, versions_table())


def between(page: str, marks: tuple[str, str], table: str) -> str:
    """The page with that table between those marks."""
    before, _, rest = page.partition(marks[0])
    after = rest.partition(marks[1])[2]
    return f"{before}{marks[0]}\n{table}\n{marks[1]}{after}"


def main() -> None:
    """Write docs/metrics.md and README's tables."""
    METRICS_PAGE.write_text(metrics_page())
    README.write_text(readme())


if __name__ == "__main__":
    typer.run(main)
