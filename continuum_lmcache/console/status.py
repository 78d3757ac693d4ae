"""`continuum-lmcache status URL`: whether continuum is on, what it brings, and what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from continuum_lmcache.console.doctor_output import findings_json, headed, show_findings
from continuum_lmcache.console.fleet import findings
from continuum_lmcache.console.metrics_page import MetricsPage
from continuum_lmcache.telemetry.findings import Finding, Severity
from continuum_lmcache.telemetry.health_rules import ServerFigures, diagnose, summary

Place = tuple[str, int | None]
"""A URL, and which replica of the fleet there."""
OF_A_REPLICA = {  # in a fleet: title, field
    "replica": "rank",
    "report age, s": "report_age_seconds",
    "programs": "programs",
    "requests": "requests",
    "wait, s": "wait_seconds",
}
SHOWN = {  # label -> figure, format
    "running turns": ("running_turns", "{:,.0f}"),
    "waiting turns": ("waiting_turns", "{:,.0f}"),
    "new programs that wait to start": ("held_programs", "{:,.0f}"),
    "KV cache in use": ("kv_usage", "{:.0%}"),
    "  of it pinned": ("pinned_share", "{:.0%}"),
    "turns finished": ("finished_turns", "{:,.0f}"),
    "preemptions": ("preemptions", "{:,.0f}"),
}


def share_of_blocks(page: MetricsPage, name: str) -> float | None:
    """A gauge over all blocks of all engines."""
    blocks = page.total(name)
    sizes = [labels.get("num_gpu_blocks", "") for labels, _ in page.of("vllm:cache_config_info")]
    total = sum(int(size) for size in sizes if size.isdecimal())
    return blocks / total if blocks is not None and total else None


def average(page: MetricsPage, name: str) -> float | None:
    """A histogram's mean since the start."""
    seconds, count = page.total(f"{name}_sum"), page.total(f"{name}_count")
    return seconds / count if seconds is not None and count else None


def found_tokens(page: MetricsPage, name: str) -> float | None:
    """The prefix cache's hits on the GPU, and those of the connector below it."""
    hits = [page.total(f"vllm:{place}{name}") for place in ("", "external_")]
    return sum(filter(None, hits)) if hits[0] is not None else None


def by(label: str) -> Callable[[MetricsPage, str], dict[str, float]]:
    return lambda page, name: page.by(name, label)


FIELDS: Mapping[str, tuple[str, Callable[[MetricsPage, str], Any]]] = {  # figure -> metric, how it is read
    "policy": ("continuum_policy_info", lambda page, name: page.info(name).get("policy", "")),
    "programs": ("continuum_programs", MetricsPage.total),
    "running_turns": ("vllm:num_requests_running", MetricsPage.total),
    "waiting_turns": ("vllm:num_requests_waiting", MetricsPage.total),
    "held_programs": ("continuum_programs_held", MetricsPage.total),
    "kv_usage": ("vllm:kv_cache_usage_perc", MetricsPage.mean),
    "pinned_share": ("continuum_pinned_blocks", share_of_blocks),
    "finished_turns": ("vllm:request_success_total", MetricsPage.total),
    "preemptions": ("vllm:num_preemptions_total", MetricsPage.total),
    "queried_tokens": ("vllm:prefix_cache_queries_total", MetricsPage.total),
    "found_tokens": ("prefix_cache_hits_total", found_tokens),
    "first_token_s": ("vllm:time_to_first_token_seconds", average),
    "prompt_tokens": ("continuum_prompt_tokens_total", by("tier")),
    "pins": ("continuum_pins_total", by("outcome")),
    "ttl_decisions": ("continuum_ttl_decisions_total", by("reason")),
    "working_set_tokens": ("continuum_working_set_tokens", MetricsPage.total),
    "tier_capacity_tokens": ("continuum_tier_capacity_tokens", by("tier")),
    "tier_store_up": ("continuum_tier_store_up", MetricsPage.least),
    "lost_tokens": ("continuum_lost_tokens_total", by("cause")),
    "ignored_fields": ("continuum_ignored_fields_total", by("field")),
}


def figures(page: MetricsPage) -> ServerFigures:
    return ServerFigures(**{figure: read(page, metric) for figure, (metric, read) in FIELDS.items()})


def places_at(url: str, report: Mapping[str, Any] | None) -> list[Place]:
    """The servers behind a URL: each replica of a fleet, or the single server."""
    return [(url, row.get("rank")) for row in report["replicas"]] if report is not None else [(url, None)]


def has_problems(found: Sequence[Finding]) -> bool:
    """Whether a finding is worse than a NOTE."""
    return any(finding.severity is not Severity.NOTE for finding in found)


def as_json(seen: ServerFigures) -> dict[str, Any]:
    """What the screen has."""
    found = diagnose(seen)
    return {
        "schema": 2,
        "ok": not has_problems(found),
        "summary": summary(seen),
        "figures": asdict(seen),
        "findings": findings_json(found),
    }


def joined(
    places: Sequence[Place], servers: Sequence[dict[str, Any]], fleets: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Several servers (as_json), and their fleets, as one JSON object."""
    found = {url: list(findings(report)) for url, report in fleets.items()}
    return {
        "schema": 2,
        "ok": all(one["ok"] for one in servers) and not any(has_problems(each) for each in found.values()),
        "fleets": {url: {**report, "findings": findings_json(found[url])} for url, report in fleets.items()},
        "servers": [
            {"url": url, "replica": rank, **one} for (url, rank), one in zip(places, servers, strict=True)
        ],
    }


def show(url: str, seen: ServerFigures, console: Console) -> None:
    """The summary, what is wrong, and the figures."""
    found = diagnose(seen)
    console.print(Text(f"{url}: {summary(seen)}", style="bold"), soft_wrap=True)
    show_findings(found, console)
    table = headed("", "")
    for label, (name, form) in SHOWN.items():
        value = getattr(seen, name)
        table.add_row(label, "not reported" if value is None else form.format(value))
    for cause, tokens in seen.lost_tokens.items():
        if tokens:
            table.add_row(f"lost, {cause}", f"{tokens:,.0f} tokens")
    console.print(table)
    console.print(Text(f"{'Something' if has_problems(found) else 'Nothing'} is wrong.\n", style="bold"))


def show_fleet(url: str, report: Mapping[str, Any], console: Console) -> None:
    """The replicas, the outcomes of turns, and findings."""
    console.print(Text(f"{url}, a fleet of {len(report['replicas'])} replicas", style="bold"), soft_wrap=True)
    console.print(replicas(report))
    turns = ", ".join(f"{n:,} {why}" for why, n in report.get("turns", {}).items()) or "none"
    console.print(Text(f"turns: {turns}"), soft_wrap=True)
    show_findings(findings(report), console)


def replicas(report: Mapping[str, Any]) -> Table:
    table = headed(*OF_A_REPLICA)
    for row in report["replicas"]:
        cells = (row.get(field) for field in OF_A_REPLICA.values())
        table.add_row(*("" if cell is None else f"{cell:,}" for cell in cells))
    return table
