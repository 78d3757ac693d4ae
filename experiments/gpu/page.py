"""Writes one page of the results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import yaml
from scipy import stats

from experiments import agentx
from experiments.gpu.agents import FIGURES
from experiments.tables import markdown

Rows = Mapping[str, Mapping[str, Any]]
TOKENS = ("exact", "native", "gemma3", "gpt-oss", "qwen3-next", "rounding")
LEVEL = {"tpot_s": "a token", "first_ttft_s": "first token of a first turn", "later_ttft_s": "of a later one"}


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
    if pairs := rows.get("level", {}).get("rows"):
        yield "## Where memory is ample"
        yield markdown(level_table(pairs))
    if live := rows.get("agents", {}).get("rows"):
        yield "## Live sessions of Claude Code's programs"
        yield markdown(sessions_table(live, rows.get("simulated", {}).get("rows", ())))
    if found := rows.get("agentx", {}).get("rows"):
        yield "## AgentX"
        yield markdown(agentx.table(found))
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


def level_table(pairs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A line for each number of sessions and figure: the means in ms, and the ratio of each pair."""
    names = [name for name in pairs[0] if name not in ("sessions", "pair")]
    stock, ours = sorted(names, key=lambda name: name != "fcfs")
    lines = []
    for count in dict.fromkeys(pair["sessions"] for pair in pairs):
        of = [pair for pair in pairs if pair["sessions"] == count]
        for figure, words in LEVEL.items():
            means = [1e3 * fmean(pair[name][figure] for pair in of) for name in (stock, ours)]
            ratios = [pair[ours][figure] / pair[stock][figure] for pair in of]
            lines.append([str(count), words, *(f"{ms:.2f}" for ms in means), estimate(ratios)])
    return [["sessions", "time", f"{stock}, ms", f"{ours}, ms", "ratio"], *lines]


def estimate(values: Sequence[float]) -> str:
    """Mean, standard error, and 95 % interval of the pairs' values."""
    middle = fmean(values)
    if len(values) < 2:
        return f"{middle:.4f}"
    error = stdev(values) / len(values) ** 0.5
    reach = float(stats.t.ppf(0.975, len(values) - 1)) * error
    return f"{middle:.4f} +- {error:.4f} (95 %: {middle - reach:.4f} to {middle + reach:.4f})"


def sessions_table(
    live: Sequence[Mapping[str, Any]], simulated: Sequence[Mapping[str, Any]]
) -> list[list[str]]:
    """A line for each run, with the simulator's figure in brackets."""
    lines = []
    for row in live:
        line = [str(row["sessions"]), row["label"]]
        played = [r for r in simulated if (r["label"], r["sessions"]) == (row["label"], row["sessions"])]
        for name in FIGURES:
            measured, predicted = row.get(name), played[0].get(name) if played else None
            cell = row.get("why", "") if measured is None else f"{measured:.3g}"
            line.append(cell if measured is None or predicted is None else f"{cell} ({predicted:.3g})")
        lines.append(line)
    return [["sessions", "", *FIGURES], *lines]
