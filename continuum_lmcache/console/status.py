"""`continuum-lmcache status URL`: whether continuum is on, what it brings, and what is wrong.

What was found is one dictionary, which `--json` prints and `show` shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from continuum_lmcache.console import health_rules as rules
from continuum_lmcache.console.doctor_output import headed, show_findings
from continuum_lmcache.console.metrics_page import OF_A_REPLICA, MetricsPage, fleet_at, scrape
from continuum_lmcache.telemetry.findings import Finding, Severity, warning

Status = dict[str, Any]
FIGURES: Mapping[str, tuple[Callable[[MetricsPage], float | None], str]] = {  # how it is read, its format
    "running turns": (lambda page: page.total(rules.RUNNING), "{:,.0f}"),
    "waiting turns": (lambda page: page.total(rules.WAITING), "{:,.0f}"),
    "new programs that wait to start": (lambda page: page.total("continuum_programs_held"), "{:,.0f}"),
    "KV cache in use": (rules.kv_usage, "{:.0%}"),
    "  of it pinned": (rules.pinned_share, "{:.0%}"),
    "turns finished": (lambda page: page.total(rules.FINISHED), "{:,.0f}"),
    "preemptions": (lambda page: page.total(rules.PREEMPTIONS), "{:,.0f}"),
}


def status_of(url: str) -> Status:
    """Of the server at a URL, or of a fleet and each of its replicas. Raises ServerError."""
    report = fleet_at(url)
    if report is None:
        return server_status(url, scrape(url))
    ranks = [row["rank"] for row in report["replicas"]]
    replicas = [server_status(f"{url}, replica {rank}", scrape(url, rank)) for rank in ranks]
    found = list(silent_replicas(report))
    is_ok = all(replica["ok"] for replica in replicas) and not has_problems(found)
    return {"name": url, "ok": is_ok, "fleet": report, "findings": found, "replicas": replicas}


def server_status(name: str, page: MetricsPage) -> Status:
    """Of one server."""
    found = rules.diagnose(page)
    return {
        "name": name,
        "ok": not has_problems(found),
        "summary": rules.summary(page),
        "figures": {label: read(page) for label, (read, _) in FIGURES.items()},
        "lost_tokens": rules.lost_tokens(page),
        "findings": found,
    }


def silent_replicas(report: Mapping[str, Any]) -> Iterator[Finding]:
    """Replicas whose latest report is old."""
    limit_s = report["config"]["report_age_s"]
    for row in report["replicas"]:
        if row["report_age_seconds"] > limit_s:
            yield warning(
                "fleet-silent-replica",
                f"replica {row['rank']} has not reported for {row['report_age_seconds']:.0f} s",
                f"see its log; after {limit_s:.0f} s no new program starts there",
            )


def has_problems(found: Sequence[Finding]) -> bool:
    """Whether a finding is worse than a NOTE."""
    return any(finding.severity is not Severity.NOTE for finding in found)


def show(found: Status, console: Console) -> None:
    """The summary, what is wrong, and the figures."""
    if "fleet" in found:
        show_fleet(found, console)
        return
    console.print(Text(f"{found['name']}: {found['summary']}", style="bold"), soft_wrap=True)
    show_findings(found["findings"], console)
    table = headed("", "")
    for label, (_, form) in FIGURES.items():
        value = found["figures"][label]
        table.add_row(label, "not reported" if value is None else form.format(value))
    for cause, tokens in found["lost_tokens"].items():
        table.add_row(f"lost, {cause}", f"{tokens:,.0f} tokens")
    console.print(table)
    console.print(Text(f"{'Nothing' if found['ok'] else 'Something'} is wrong.\n", style="bold"))


def show_fleet(found: Status, console: Console) -> None:
    """Where turns went, what is wrong with the fleet, and each replica."""
    report, table = found["fleet"], headed(*(name.replace("_", " ") for name in OF_A_REPLICA))
    title = f"{found['name']}, a fleet of {len(report['replicas'])} replicas"
    console.print(Text(title, style="bold"), soft_wrap=True)
    for row in report["replicas"]:
        table.add_row(*(f"{row[name]:,}" for name in OF_A_REPLICA))
    console.print(table)
    turns = ", ".join(f"{n:,} {why}" for why, n in report.get("turns", {}).items()) or "none"
    console.print(Text(f"turns: {turns}"), soft_wrap=True)
    show_findings(found["findings"], console)
    for replica in found["replicas"]:
        show(replica, console)
