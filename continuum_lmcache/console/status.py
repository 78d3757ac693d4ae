"""`continuum-lmcache status URL`: whether continuum is on, what it brings, and what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from continuum_lmcache.console import health_rules as rules
from continuum_lmcache.console.doctor_output import headed, show_findings
from continuum_lmcache.console.metrics_page import MetricsPage
from continuum_lmcache.telemetry.findings import Severity

Status = dict[str, Any]

Read = Callable[[MetricsPage], float | None]
FIGURES: Mapping[str, tuple[str, Read, str]] = {  # how it is called, read and printed
    "running_turns": ("running turns", lambda page: page.total(rules.RUNNING), "{:,.0f}"),
    "waiting_turns": ("waiting turns", lambda page: page.total(rules.WAITING), "{:,.0f}"),
    "held_programs": (
        "new programs that wait to start",
        lambda page: page.total("continuum_programs_held"),
        "{:,.0f}",
    ),
    "longest_wait_s": ("  one that came now would wait at most", rules.longest_wait_s, "{:,.0f} s"),
    "live_programs": ("live programs", lambda page: page.total("continuum_live_programs"), "{:,.0f}"),
    "replicas_in_time": ("  engines that would serve them in time", rules.replicas_in_time, "{:.1f}"),
    "kv_usage": ("KV cache in use", rules.kv_usage, "{:.0%}"),
    "pinned_share": ("  of it pinned", rules.pinned_share, "{:.0%}"),
    "finished_turns": ("turns finished", lambda page: page.total(rules.FINISHED), "{:,.0f}"),
    "first_token_s": ("first token, on average", rules.first_token_s, "{:.3g} s"),
    "preemptions": ("preemptions", lambda page: page.total(rules.PREEMPTIONS), "{:,.0f}"),
}


def status_of(name: str, page: MetricsPage) -> Status:
    """Whether it is well (`ok`: nothing found is worse than a NOTE), and its figures."""
    found = rules.diagnose(page)
    return {
        "name": name,
        "ok": all(finding.severity is Severity.NOTE for finding in found),
        "summary": rules.summary(page),
        "figures": {figure: read(page) for figure, (_, read, _) in FIGURES.items()},
        "prompt_tokens": rules.prompt_tokens(page),
        "lost_tokens": rules.lost_tokens(page),
        "findings": found,
    }


def show(found: Status, console: Console) -> None:
    console.print(Text(f"{found['name']}: {found['summary']}", style="bold"), soft_wrap=True)
    show_findings(found["findings"], console)
    table = headed("", "")
    for figure, (label, _, form) in FIGURES.items():
        if (value := found["figures"][figure]) is not None:
            table.add_row(label, form.format(value))
    for cause, tokens in found["lost_tokens"].items():
        table.add_row(f"lost, {cause}", f"{tokens:,.0f} tokens")
    console.print(table)
    is_off = any(finding.name == rules.OFF for finding in found["findings"])
    verdict = "continuum is off" if is_off else f"{'Nothing' if found['ok'] else 'Something'} is wrong"
    console.print(Text(f"{verdict}.\n", style="bold"))
