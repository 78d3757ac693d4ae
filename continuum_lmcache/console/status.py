"""`continuum-lmcache status URL`: one screen on a running server, from two scrapes of its /metrics."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from continuum_lmcache.console.doctor_output import findings_json, headed, show_findings
from continuum_lmcache.console.fleet import findings
from continuum_lmcache.console.metrics_page import scrape
from continuum_lmcache.console.scrape_window import METRICS, window
from continuum_lmcache.telemetry.findings import Finding, Severity
from continuum_lmcache.telemetry.health_rules import ServerWindow, Thresholds, diagnose, not_evaluated

Place = tuple[str, int | None]
"""A URL, and which replica of the fleet there."""
OF_A_REPLICA = {  # in a fleet: title, field
    "replica": "rank",
    "report age, s": "report_age_seconds",
    "programs": "programs",
    "requests": "requests",
    "room, tokens": "headroom_tokens",
    "pending, tokens": "pending_tokens",
}
FIGURES = {  # what the screen shows of a window: label -> field, format
    "running turns": ("running_turns", "{:.1f}"),
    "waiting turns": ("waiting_turns", "{:.1f}"),
    "KV cache in use": ("kv_usage", "{:.0%}"),
    "  of it pinned": ("pinned_share", "{:.0%}"),
    "programs known": ("programs", "{:,.0f}"),
    "turns finished": ("finished_turns", "{:,.0f}"),
    "preemptions": ("preemptions", "{:,.0f}"),
    "mean wait in the queue": ("queue_s", "{:.2f} s"),
    "mean prompt": ("context_tokens", "{:,.0f} tokens"),
    "prompt tokens computed": ("computed_tokens", "{:,.0f}"),
    "steps waited for stores": ("store_s", "{:.2f} s"),
}


def watch(places: Sequence[Place], seconds: float) -> list[ServerWindow]:
    """The servers' figures of the next seconds. Raises ServerError."""
    before = [(scrape(*place), time.monotonic()) for place in places]
    time.sleep(seconds)
    return [
        window(page, scrape(*place), time.monotonic() - at_s)
        for place, (page, at_s) in zip(places, before, strict=True)
    ]


def places_at(url: str, report: Mapping[str, Any] | None) -> list[Place]:
    """The servers behind a URL: each replica of a fleet, or the single server."""
    return [(url, row["rank"]) for row in report["replicas"]] if report is not None else [(url, None)]


def has_problems(findings: list[Finding]) -> bool:
    """Whether a finding is worse than a NOTE."""
    return any(finding.severity is not Severity.NOTE for finding in findings)


def as_json(seen: ServerWindow, targets: Thresholds) -> dict[str, Any]:
    """The window, the findings, and the checks that could not be made."""
    found = diagnose(seen, targets)
    return {
        "schema": 1,
        "ok": not has_problems(found),
        "window": dataclasses.asdict(seen),
        "findings": findings_json(found),
        "not_checked": {
            rule: [METRICS[name] for name in fields] for rule, fields in not_evaluated(seen).items()
        },
    }


def joined(
    places: Sequence[Place], servers: Sequence[dict[str, Any]], fleets: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Several servers (as_json), and their fleets, as one JSON object."""
    found = {url: list(findings(report)) for url, report in fleets.items()}
    return {
        "schema": 1,
        "ok": all(one["ok"] for one in servers) and not any(has_problems(each) for each in found.values()),
        "fleets": {url: {**report, "findings": findings_json(found[url])} for url, report in fleets.items()},
        "servers": [
            {"url": url, "replica": rank, **one} for (url, rank), one in zip(places, servers, strict=True)
        ],
    }


def show(url: str, seen: ServerWindow, targets: Thresholds, console: Console) -> None:
    """Figures, findings, and the metrics that this server lacks."""
    console.print(Text(f"{url}, watched for {seen.seconds:.1f} s"), soft_wrap=True)
    table = headed("", "")
    for label, (name, form) in FIGURES.items():
        value = getattr(seen, name)
        table.add_row(label, "not reported" if value is None else form.format(value))
    for tier, tokens in seen.loaded_tokens.items():
        table.add_row(f"loaded from {tier}", f"{tokens:,.0f} tokens in {seen.load_s.get(tier, 0.0):.2f} s")
    for cause in (cause for cause, returns in seen.lost_returns.items() if returns):
        table.add_row(f"lost to {cause}", lost(seen, cause))
    if seen.load_decisions:
        table.add_row("load decisions", listed(seen.load_decisions))
    console.print(table)
    found = diagnose(seen, targets)
    show_findings(found, console)
    for rule, fields in not_evaluated(seen).items():
        names = ", ".join(METRICS[name] for name in fields)
        console.print(Text(f"not checked: {rule} (no {names} in these {seen.seconds:.0f} s)", style="dim"))
    what = "Something" if has_problems(found) else "Nothing"
    console.print(Text(f"\n{what} is wrong.", style="bold"))


def lost(seen: ServerWindow, cause: str) -> str:
    """What returns lost by one cause. With several engines no token is shown."""
    returns, at = seen.lost_returns[cause], seen.lost_at_token.get(cause)
    found = f"{returns:,.0f} returns, {seen.lost_s.get(cause, 0.0):.2f} s of prefill"
    return found if at is None else f"{found}, the latest at token {at:,.0f}"


def listed(counts: Mapping[str, float]) -> str:
    return ", ".join(f"{count:,.0f} {what}" for what, count in counts.items())


def show_fleet(url: str, report: Mapping[str, Any], console: Console) -> None:
    """The replicas, the outcomes of turns, and findings."""
    console.print(Text(f"{url}, a fleet of {len(report['replicas'])} replicas", style="bold"), soft_wrap=True)
    console.print(replicas(report))
    turns = ", ".join(f"{n:,} {why}" for why, n in report["turns"].items()) or "none"
    console.print(Text(f"programs: {report['programs']:,}; turns: {turns}"), soft_wrap=True)
    show_findings(findings(report), console)


def replicas(report: Mapping[str, Any]) -> Table:
    table = headed(*OF_A_REPLICA)
    for row in report["replicas"]:
        cells = (row.get(field) for field in OF_A_REPLICA.values())
        table.add_row(*("" if cell is None else f"{cell:,}" for cell in cells))
    return table
