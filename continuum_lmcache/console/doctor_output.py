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
from continuum_lmcache.capacity.kv_budget import programs_that_fit
from continuum_lmcache.console.doctor import Diagnosis, seconds_at
from continuum_lmcache.telemetry.findings import Finding, Severity
from continuum_lmcache.types import Tier

SCHEMA = 1
Titled = tuple[str, Table]
CONTEXTS_TOKENS = (1_024, 8_192, 32_768)
STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}


def contexts(found: Diagnosis) -> list[int]:
    """Contexts for the table of costs: round ones and the mean, within the window."""
    window = found.plan.shape.window_tokens
    return sorted({c for c in (*CONTEXTS_TOKENS, found.plan.demand.mean_tokens) if c <= window})


def holds(found: Diagnosis) -> dict[str, int]:
    """Tokens that each place holds."""
    plan = found.plan
    return {"gpu": plan.budget.tokens, **{tier.value: tokens for tier, tokens in plan.tiers.items()}}


def as_json(found: Diagnosis) -> dict[str, Any]:
    """Schema 1. Infinite numbers are null."""
    plan = found.plan
    return {
        "schema": SCHEMA,
        "advisable": found.advisable,
        "model": {"name": plan.shape.name, "window_tokens": plan.shape.window_tokens},
        "costs": {
            "source": found.machine.source,
            "device": found.machine.device,
            "measured": plan.costs.measured,
        },
        "budget": {
            "steps": [asdict(step) for step in plan.budget.steps],
            "bytes_per_token": plan.budget.bytes_per_token,
            "blocks": plan.budget.blocks,
            "tokens": plan.budget.tokens,
        },
        "demand": {
            "source": plan.demand.source,
            "programs": len(plan.demand.contexts_tokens),
            "mean_tokens": plan.demand.mean_tokens,
            "max_tokens": max(plan.demand.contexts_tokens),
            "gaps": len(plan.demand.gaps_s),
        },
        "holds": {
            place: {"tokens": tokens, "programs": programs_that_fit(tokens, plan.demand.contexts_tokens)}
            for place, tokens in holds(found).items()
        },
        "break_even_tokens": {tier.value: finite(break_even_tokens(plan.costs, tier)) for tier in TIERS},
        "seconds_at": {str(tokens): seconds_at(plan, tokens) for tokens in contexts(found)},
        "pins": {
            "answer": found.pins.answer,
            "why": found.pins.why,
            "by_place": {
                tier.value: {
                    "reload_s": pin.reload_s,
                    "best_ttl_s": pin.best.ttl_s,
                    "probability": pin.best.probability,
                    "gain_s": pin.gain_s,
                    "least_delay_s": finite(pin.least_delay_s),
                }
                for tier, pin in found.pins.by_tier.items()
            },
        },
        "findings": findings_json(found.findings),
    }


TIERS = (Tier.DRAM, Tier.SSD)


def findings_json(findings: Iterable[Finding]) -> list[dict[str, str]]:
    return [{**asdict(finding), "severity": finding.severity.value} for finding in findings]


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def show(found: Diagnosis, console: Console) -> None:
    """The whole answer, from the arithmetic to the verdict."""
    plan = found.plan
    measured = "measured" if plan.costs.measured else "measured: false"
    costs = f"costs from {found.machine.source}, {measured}"
    console.print(Text(f"{plan.shape.name} on {found.machine.device}; {costs}"))
    for title, table in (arithmetic(found), capacities(found), times(found), pins(found)):
        console.print(Text(f"\n{title}", style="bold"), soft_wrap=True)
        console.print(table)
    console.print(Text(f"\nCan pins pay here? {found.pins.answer}: {found.pins.why}."), soft_wrap=True)
    show_findings(found.findings, console)
    console.print(Text(f"\n{found.verdict}", style="bold"))


def arithmetic(found: Diagnosis) -> Titled:
    table = headed("", "", "how")
    for step in found.plan.budget.steps:
        value = f"{step.value:,.2f}" if isinstance(step.value, float) else f"{step.value:,}"
        table.add_row(step.name, f"{value} {step.unit}", step.how)
    return "KV budget, one rank", table


def capacities(found: Diagnosis) -> Titled:
    demand = found.plan.demand
    about = f"{len(demand.contexts_tokens)} programs" if len(demand.contexts_tokens) > 1 else "one program"
    title = f"Programs that fit: {about}, mean context {demand.mean_tokens:,} tokens ({demand.source})"
    table = headed("where", "tokens", "programs")
    for place, tokens in holds(found).items():
        table.add_row(place, f"{tokens:,}", f"{programs_that_fit(tokens, demand.contexts_tokens):,}")
    return title, table


def times(found: Diagnosis) -> Titled:
    table = headed("tokens", "recompute", *(tier.value for tier in TIERS))
    for tokens in contexts(found):
        table.add_row(f"{tokens:,}", *(f"{s:.4g}" for s in seconds_at(found.plan, tokens).values()))
    table.add_section()
    table.add_row("loading pays", "", *(break_even(found, tier) for tier in TIERS))
    return "Seconds to bring a context back", table


def break_even(found: Diagnosis, tier: Tier) -> str:
    """The break-even in words."""
    tokens = break_even_tokens(found.plan.costs, tier)
    if math.isinf(tokens):
        return "never"
    return f"from {math.ceil(tokens):,} tokens" if tokens else "always"


def pins(found: Diagnosis) -> Titled:
    title = f"A pin of {found.plan.demand.mean_tokens:,} tokens with an empty queue (eq. 2, T = 0)"
    heads = ("else in", "PrefillReload", "best TTL", "P(back)", "gain a turn", "pays from T of")
    table = headed(*heads)
    for tier, pin in found.pins.by_tier.items():
        figures = (pin.reload_s, pin.best.ttl_s, pin.best.probability, pin.gain_s)
        reload_s, ttl_s, chance, gain_s = (f"{x:.3g}" for x in figures)
        least_s = f"{max(0.0, pin.least_delay_s):.3g} s"
        table.add_row(tier.value, f"{reload_s} s", f"{ttl_s} s", chance, f"{gain_s} s", least_s)
    return title, table


def show_findings(findings: Iterable[Finding], console: Console) -> None:
    """One line for each finding, and one for what to do."""
    for f in findings:
        console.print(Text(f"\n{f.severity.value.upper()} {f.name}", style=STYLES[f.severity]))
        console.print(Text(f"  found: {f.evidence}"), soft_wrap=True)
        console.print(Text(f"  do:    {f.remedy}"), soft_wrap=True)


def headed(*heads: str) -> Table:
    """A table. Its first column, and one headed "how", are text; the others are numbers."""
    table = Table(box=None, padding=(0, 2))
    for index, head in enumerate(heads):
        table.add_column(head, justify="left" if index == 0 or head == "how" else "right")
    return table
