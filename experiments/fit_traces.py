"""Fits the generator of agents' programs to real traces, and compares both.

    python -m experiments.fit_traces        # writes sim/fitted_programs.yaml and docs/fitted-programs.md

Needs the traces (sim/trace_programs.py says where). It is fitted to the half `tune`; the table has real and
drawn quantiles of that half, and of the half `report`, which the fit does not use.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import typer
import yaml
from scipy.stats import spearmanr

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python PATH` as well as -m

from experiments.sim.fitted_programs import LEVELS, PATH, Quantiles, Shape, generate
from experiments.sim.trace_programs import SOURCES, WINDOW_TOKENS, half
from experiments.tables import markdown
from experiments.workload import Program

TRACES = tuple(name for name in SOURCES if name != "chat")
MOST_TOOLS = 8  # of a trace; the rest is one more
LEAST_S = 1e-3  # of a tool
SHOWN = (0.1, 0.5, 0.9, 0.99)
DRAWN, SEED = 2000, 1
DOCS = Path(__file__).resolve().parent / "records" / "fitted-programs.md"
WHERE = {
    "claude-code-swe": "yunwei37/agentcgroup (Claude Code on SWE-rebench)",
    "claude-code": "callanjfox/kv-cache-tester, weka (Claude Code)",
    "mini-swe": "LMCache/lmcache-agent-trace (mini-swe-agent); tool times from claude-code-swe",
    "bfcl": "bbrowning/bfcl-vllm-results (BFCL v4, many turns); tool times from claude-code-swe",
}


def fitted(name: str, programs: Sequence[Program]) -> dict[str, Any]:
    """A trace's row of the file."""
    long = [p for p in programs if len(p.turns) > 1]
    means = {p.program_id: np.mean([t.new_tokens for t in p.turns[1:]]) for p in long}
    ratios = [t.new_tokens / max(1.0, means[p.program_id]) for p in long for t in p.turns[1:]]
    stripped = [a.context_tokens - b.kept_tokens for p in programs for a, b in pairwise(p.turns)]
    some = [tokens for tokens in stripped if tokens > 0]
    correlation = spearmanr([len(p.turns) for p in long], [means[p.program_id] for p in long]).statistic
    found = {
        "turns": Quantiles.of([len(p.turns) for p in programs], 1),
        "first_prompt": Quantiles.of([p.turns[0].input_tokens for p in programs], 1),
        "mean_new": Quantiles.of(list(means.values()), 1),
        "new_over_mean": Quantiles.of(ratios, 1e-3),
        "output": Quantiles.of([t.output_tokens for p in programs for t in p.turns], 1),
        "stripped": Quantiles.of(some or [1.0], 1),
    }
    return {
        "source": WHERE[name],
        "programs": len(programs),
        "window_tokens": WINDOW_TOKENS,
        "turns_and_new": round(float(correlation), 3),
        "stripped_share": round(len(some) / max(1, len(stripped)), 4),
        **{key: list(of.values) for key, of in found.items()},
        "tools": tools(programs),
    }


def tools(programs: Sequence[Program]) -> list[dict[str, Any]]:
    """The most frequent commands, each with its own times; all others together."""
    by_command: dict[str, list[float]] = defaultdict(list)
    for program in programs:
        for turn in program.turns[:-1]:
            assert turn.gap_s is not None  # trace_programs drew those that the trace does not say
            words = turn.command.split()
            by_command[words[0] if words and words[0].isalnum() else turn.tool or "other"].append(turn.gap_s)
    ranked = sorted(by_command, key=lambda command: -len(by_command[command]))
    groups = {command: by_command[command] for command in ranked[:MOST_TOOLS]}
    if rest := [gap_s for command in ranked[MOST_TOOLS:] for gap_s in by_command[command]]:
        groups["other"] = groups.get("other", []) + rest
    every = sum(map(len, groups.values()))
    return [
        {
            "command": command,
            "share": round(len(gaps_s) / every, 4),
            "seconds": list(Quantiles.of(gaps_s, LEAST_S).values),
        }
        for command, gaps_s in groups.items()
    ]


COMPARED: Mapping[str, Callable[[Sequence[Program]], list[float]]] = {
    "turns": lambda ps: [len(p.turns) for p in ps],
    "first prompt, tokens": lambda ps: [p.turns[0].input_tokens for p in ps],
    "final context, tokens": lambda ps: [p.context_tokens for p in ps],
    "new tokens of a later turn": lambda ps: [t.new_tokens for p in ps for t in p.turns[1:]],
    "output of a turn, tokens": lambda ps: [t.output_tokens for p in ps for t in p.turns],
    "tool, s": lambda ps: [t.gap_s or 0.0 for p in ps for t in p.turns[:-1]],
    "all tools of a program, s": lambda ps: [sum(t.gap_s or 0.0 for t in p.turns[:-1]) for p in ps],
    "all prompts of a program, tokens": lambda ps: [sum(t.input_tokens for t in p.turns) for p in ps],
}


def compared(name: str, shape: Shape) -> list[list[str]]:
    """Quantiles of the fitted half, of drawn programs, and of the other half."""
    groups = [half(name, "tune"), generate(shape, name, DRAWN, SEED), half(name, "report")]
    head = [name, *(f"{100 * level:g} %: fitted to, drawn, other half" for level in SHOWN)]
    lines = [head]
    for what, of in COMPARED.items():
        found = [np.quantile(of(programs), SHOWN) for programs in groups]
        lines.append([what, *(", ".join(f"{values[i]:.3g}" for values in found) for i in range(len(SHOWN)))])
    return lines


def page(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """docs/fitted-programs.md."""
    tables = [markdown(compared(name, Shape.read(row))) for name, row in rows.items()]
    return "\n\n".join(
        [
            "# Programs fitted to real agents' traces",
            "Made by `python -m experiments.fit_traces`; do not edit. The generator and its parameters are "
            "`experiments/sim/fitted_programs.py` and `.yaml`. The simulator draws from it with "
            "`python -m experiments.offload_sweep traces --half fitted`; no trace is needed for that.",
            f"Each cell has the half of the trace that was fitted, {DRAWN} drawn programs, and the half that "
            "was not seen.",
            *tables,
        ]
    )


def main() -> None:
    """Fit and compare."""
    rows = {name: fitted(name, half(name, "tune")) for name in TRACES}
    head = f"# Made by python -m experiments.fit_traces; do not edit. Quantiles at {list(LEVELS)}.\n"
    PATH.write_text(head + yaml.safe_dump(rows, sort_keys=False, default_flow_style=None, width=110))
    DOCS.write_text(page(rows) + "\n")
    typer.echo(f"wrote {PATH.name} and {DOCS.name}")


if __name__ == "__main__":
    typer.run(main)
