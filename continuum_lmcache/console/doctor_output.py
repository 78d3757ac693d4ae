"""A Diagnosis on the terminal, or as one JSON object."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from continuum_lmcache.capacity.break_even import break_even_tokens
from continuum_lmcache.console.doctor import Diagnosis
from continuum_lmcache.telemetry.findings import Finding, Severity
from continuum_lmcache.types import Tier

SCHEMA = 2
TIERS = (Tier.DRAM, Tier.SSD)
STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}


def holds(found: Diagnosis) -> dict[str, int]:
    """Tokens that each place holds."""
    plan = found.plan
    return {"gpu": plan.budget.tokens, **{tier.value: tokens for tier, tokens in plan.tiers.items()}}


def as_json(found: Diagnosis) -> dict[str, Any]:
    """Schema 2. Infinite numbers are null; `break_even_tokens` is null without a profile."""
    plan, costs = found.plan, found.plan.costs
    contexts = plan.demand.contexts_tokens
    even = {t.value: break_even_tokens(costs, t) for t in TIERS} if costs is not None else None
    return {
        "schema": SCHEMA,
        "advisable": found.advisable,
        "model": {"name": plan.shape.name, "window_tokens": plan.shape.window_tokens},
        "device": found.machine.device,
        "costs": {"source": found.machine.source, "measured": costs is not None and costs.measured},
        "budget": {
            "steps": [asdict(step) for step in plan.budget.steps],
            "bytes_per_token": plan.budget.bytes_per_token,
            "blocks": plan.budget.blocks,
            "tokens": plan.budget.tokens,
        },
        "demand": {
            "source": plan.demand.source,
            "programs": len(contexts),
            "mean_tokens": plan.demand.mean_tokens,
            "max_tokens": max(contexts),
        },
        "holds": {
            place: {"tokens": tokens, "programs": plan.programs_in(tokens)}
            for place, tokens in holds(found).items()
        },
        "break_even_tokens": even and {n: v if math.isfinite(v) else None for n, v in even.items()},
        "findings": found.findings,
    }


def show(found: Diagnosis, console: Console, explain: bool = False) -> None:
    """The verdict and what to do first, in six lines; then, if asked, all findings and the arithmetic."""
    plan = found.plan
    console.print(Text(found.verdict, style="bold"))
    programs = f"{plan.fits:,} programs of {plan.demand.mean_tokens:,}"
    size = f"its KV cache holds {plan.budget.tokens:,} tokens, {programs}"
    console.print(Text(f"{plan.shape.name} on {found.machine.device}: {size}."), soft_wrap=True)
    if plan.costs is not None and plan.budget.blocks:
        pays = [f"from {tier.value} {in_words(break_even_tokens(plan.costs, tier))}" for tier in TIERS]
        console.print(Text(f"Loading pays {', '.join(pays)} ({found.costs_from})."), soft_wrap=True)
    shown = found.findings if explain else found.findings[:1]
    show_findings(shown, console)
    if not explain:
        more = f"{len(found.findings) - 1} more findings and " if len(found.findings) > 1 else ""
        console.print(Text(f"{more}the arithmetic: --explain", style="dim"))
        return
    if not plan.budget.blocks:
        return  # the rest would be of a server that cannot start
    titled("KV budget, one rank", arithmetic(found), console)
    mean = f"mean context {plan.demand.mean_tokens:,} tokens ({plan.demand.source})"
    titled(f"Programs that fit: {mean}", capacities(found), console)


def titled(title: str, table: Table, console: Console) -> None:
    console.print(Text(f"\n{title}", style="bold"), soft_wrap=True)
    console.print(table)


def arithmetic(found: Diagnosis) -> Table:
    table = headed("", "", "how")
    for step in found.plan.budget.steps:
        value = f"{step.value:,.2f}" if isinstance(step.value, float) else f"{step.value:,}"
        table.add_row(step.name, f"{value} {step.unit}", step.how)
    return table


def capacities(found: Diagnosis) -> Table:
    table = headed("where", "tokens", "programs")
    for place, tokens in holds(found).items():
        table.add_row(place, f"{tokens:,}", f"{found.plan.programs_in(tokens):,}")
    return table


def in_words(tokens: float) -> str:
    """The break-even."""
    if math.isinf(tokens):
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
