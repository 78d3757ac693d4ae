"""A Diagnosis on the terminal, and findings of any command."""

from __future__ import annotations

import math
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from continuum_lmcache.console.doctor import Diagnosis
from continuum_lmcache.telemetry.findings import Finding, Severity

STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}


def show(found: Diagnosis, console: Console, explain: bool = False) -> None:
    """The verdict and what to do first, in six lines; then, if asked, all findings and the arithmetic."""
    console.print(Text(found.verdict, style="bold"))
    held = f"{found.tokens['gpu']:,} tokens, {found.programs['gpu']:,} programs of {found.context_tokens:,}"
    console.print(Text(f"{found.model} on {found.device}: its KV cache holds {held}."), soft_wrap=True)
    if found.costs_from and found.tokens["gpu"]:
        pays = ", ".join(f"from {tier} {in_words(even)}" for tier, even in found.break_even_tokens.items())
        console.print(Text(f"Loading pays {pays} ({found.costs_from})."), soft_wrap=True)
    show_findings(found.findings if explain else found.findings[:1], console)
    if not explain:
        more = f"{len(found.findings) - 1} more findings and " if len(found.findings) > 1 else ""
        console.print(Text(f"{more}the arithmetic: --explain", style="dim"))
    elif found.tokens["gpu"]:  # the rest would be of a server that cannot start
        steps, places = headed("KV budget, one rank", "", "how"), headed("where", "tokens", "programs")
        for step in found.arithmetic:
            value = f"{step.value:,.2f}" if isinstance(step.value, float) else f"{step.value:,}"
            steps.add_row(step.name, f"{value} {step.unit}", step.how)
        for place, tokens in found.tokens.items():
            places.add_row(place, f"{tokens:,}", f"{found.programs[place]:,}")
        console.print("", steps, "", places, sep="\n")


def in_words(tokens: float | None) -> str:
    if tokens is None:
        return "never"
    return f"from {math.ceil(tokens):,} tokens" if tokens else "always"


def show_findings(findings: Iterable[Finding], console: Console) -> None:
    """Two lines for each finding: what was found, and what to do."""
    for f in findings:
        name = Text(f"{f.severity.value.upper()} {f.name}", style=STYLES[f.severity])
        console.print(name.append(f": {f.evidence}", style="default"), soft_wrap=True)
        console.print(Text(f"  do: {f.remedy}"), soft_wrap=True)


def headed(*heads: str) -> Table:
    """A table. Its first column, and one headed "how", are text; the others are numbers."""
    table = Table(box=None, padding=(0, 2))
    for index, head in enumerate(heads):
        table.add_column(head, justify="left" if index == 0 or head == "how" else "right")
    return table
