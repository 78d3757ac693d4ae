"""How well does a program's first prompt predict the rest?    python -m experiments.firstprompts

Table 1's generator sets two correlations that a scheduler can use: of a first prompt with the program's
whole work, and of its turns with its size. They are computed for the generator and for real traces:
correlations of logarithms over programs of two turns or more, work being all tokens that must be computed
once (new prompt tokens and outputs), and the exponent that controller.py learns as `trust`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python PATH` as well as -m

from continuum_lmcache.admission.context_growth import ContextGrowth
from experiments.table1 import GENERATORS, generate
from experiments.toolkeys import TRACES
from experiments.workload import Program, load_trace

DRAWN = 400  # programs of each generator


def table_row(name: str, programs: Sequence[Program]) -> list[str]:
    """One line: how many, medians, correlations, trust."""
    longer = [p for p in programs if len(p.turns) > 1]
    first = [p.turns[0].input_tokens for p in longer]
    work = [sum(t.new_tokens + t.output_tokens for t in p.turns) for p in longer]
    turns = [len(p.turns) for p in longer]
    final = [p.turns[-1].context_tokens for p in longer]
    growth = ContextGrowth()
    for program, size in zip(longer, final, strict=True):
        growth.add_program(len(program.turns), program.turns[0].input_tokens, size)
    medians = (f"{np.median(column):,.0f}" for column in (first, final, turns))
    pairs = ((first, work), (first, turns), (turns, final))
    together = (f"{correlation(*pair):.2f}" for pair in pairs)
    return [name, str(len(longer)), *medians, *together, f"{growth.trust:.2f}"]


def correlation(x: Sequence[int], y: Sequence[int]) -> float:
    """Pearson's, of the logarithms."""
    return float(np.corrcoef(np.log(np.maximum(x, 1)), np.log(np.maximum(y, 1)))[0, 1])


def main(traces: Annotated[Path, typer.Option(help="a folder of traces")] = TRACES) -> None:
    """Print the table."""
    columns = ("", "programs", "first", "final", "turns", "first/work", "first/turns", "turns/final", "trust")
    table = Table(*columns, title="medians in tokens and turns; correlations of logarithms")
    for name in GENERATORS:
        table.add_row(*table_row(f"generator {name}", generate(name, DRAWN, seed=1)))
    for path in sorted(traces.glob("*.jsonl")):
        table.add_row(*table_row(path.stem, load_trace(path)))
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)
