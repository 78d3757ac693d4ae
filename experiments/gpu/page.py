"""Writes one page of the results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from experiments.gpu.programs import off_by
from experiments.tables import markdown

Rows = Mapping[str, Mapping[str, Any]]
TOKENS = ("exact", "rounding")


def write(rows: Rows, setting: Mapping[str, Any], out: Path) -> None:
    """OUT/gpu-check.md."""
    (out / "gpu-check.md").write_text("\n\n".join(sections(rows, setting, out)) + "\n")


def sections(rows: Rows, setting: Mapping[str, Any], out: Path) -> Iterator[str]:
    yield "# What this machine was found to do"
    yield "Made by `python -m experiments.gpu_check`."
    yield markdown([["", ""], *([str(name), str(value)] for name, value in setting.items())])
    if found := rows.get("versions"):
        yield markdown([["found", ""], *([name, text(value)] for name, value in facts(found))])
    yield "## Stages"
    yield markdown([["stage", "s", "outcome"], *stages(rows)])
    if table := tokens_table(rows):
        yield "## Are the tokens right?"
        yield "How far log probabilities are from plain PyTorch's in float32."
        yield markdown(table)
    if (out / "profile.yaml").exists() and "profile" in rows:
        yield "## What it costs"
        yield from profile_of(yaml.safe_load((out / "profile.yaml").read_text()))
    if runs := rows.get("programs", {}).get("rows"):
        yield "## H1's programs"
        yield markdown(programs_table(runs))
        if errors := off_by(runs):
            share = 100 * median(abs(error) for error in errors)
            yield f"Simulated mean job times are off by {share:.0f} % in the median of {len(errors)} runs."
    if table := rows.get("cost", {}).get("table"):
        yield "## Our scheduler's own time"
        yield markdown(table)


def facts(found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in found.items():
        if name not in ("failed", "seconds"):
            yield name, value


def text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {text(of)}" for name, of in value.items())
    if isinstance(value, list):
        return "; ".join(map(text, value))
    return str(value)


def stages(rows: Rows) -> list[list[str]]:
    return [[name, f"{row['seconds']:.0f}", row["failed"] or "ok"] for name, row in rows.items()]


def tokens_table(rows: Rows) -> list[list[str]]:
    lines = []
    for stage in TOKENS:
        for run in ("roomy", "pressed"):
            if of := rows.get(stage, {}).get(run):
                figures = (f"{of[name]:.2g}" for name in ("median", "worst_token", "worst_turn"))
                lines.append([stage, run, f"{of['turns']:,}", f"{of['tokens']:,}", *figures])
    head = ["stage", "run", "turns", "tokens", "median", "worst token", "worst turn's mean"]
    return [head, *lines] if lines else []


def profile_of(profile: Mapping[str, Any]) -> Iterator[str]:
    """Rates, and the decode step by batch and chunk."""
    rates = [["", ""], ["prefill, tokens/s without context", f"{1 / profile['prefill']['per_token_s']:,.0f}"]]
    for name in ("dram", "dram_store", "ssd", "ssd_store"):
        rates.append([f"{name}, GB/s", f"{profile[name]['bytes_per_s'] / 1e9:.2f}"])
    yield markdown(rates)
    points = profile["provenance"]["steps"]["points"]
    names = ("chunk_tokens", "context_tokens", "decoding")
    lines = [[*(str(p[name]) for name in names), f"{1e3 * p['median_s']:.2f}", str(p["n"])] for p in points]
    yield markdown([["chunk, tokens", "context, tokens", "decoding", "step, ms", "n"], *lines])


def programs_table(runs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    head = ["load", "programs a second", "", "mean job, s", "P95, s", "longest first token, s"]
    head += ["simulated, s", "cut"]
    return [head, *(programs_line(row) for row in sorted(runs, key=lambda row: row["jps"]))]


def programs_line(row: Mapping[str, Any]) -> list[str]:
    figures = [row.get(name) for name in ("mean_s", "p95_s", "ttft_max_s")]
    figures.append(row.get("predicted", {}).get("mean_s"))
    shown = ["" if value is None else f"{value:.2f}" for value in figures]
    return [row["load"], f"{row['jps']:.2f}", row["label"], *shown, str(row.get("cut", ""))]
