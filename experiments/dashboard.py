"""The Grafana dashboard of one server on one screen, and a row for a fleet, from one list of panels.

python -m experiments.dashboard        # writes docs/grafana/continuum.json
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DASHBOARD = ROOT / "docs" / "grafana" / "continuum.json"
SOURCE = {"type": "prometheus", "uid": "${source}"}
RANGE = "$__rate_interval"
TTFT = "vllm:time_to_first_token_seconds"
COLUMNS, PANEL_HEIGHT, STAT_HEIGHT = 24, 7, 3


@dataclass(frozen=True)
class Panel:
    """One question about the server, and the queries that answer it, by legend."""

    title: str
    unit: str  # Grafana's name of it
    queries: dict[str, str]
    text: str = ""


def rate(counter: str, by: str = "") -> str:
    """A counter's growth a second, summed over engines."""
    return f"sum {f'by ({by}) ' if by else ''}(rate({counter}[{RANGE}]))"


def quantile(q: float, histogram: str, by: str = "") -> str:
    """A quantile of the samples in the range."""
    return f"histogram_quantile({q}, {rate(f'{histogram}_bucket', f'le, {by}' if by else 'le')})"


STATS = (
    Panel("programs known", "short", {"": "sum(continuum_programs)"}),
    Panel("wait to start", "short", {"": "sum(continuum_programs_held)"}, "programs in admission's line"),
    Panel("pins held", "short", {"": "sum(continuum_pins_held)"}),
    Panel("store up", "short", {"": "min(continuum_tier_store_up)"}),
    Panel("fewest samples of a rate", "short", {"{{rate}}": "min by (rate) (continuum_rate_samples)"}),
    Panel("policy", "short", {"{{policy}}": "max by (policy) (continuum_policy_info)"}),
)
PANELS = (
    Panel(
        "Turns",
        "short",
        {
            "running": "sum(vllm:num_requests_running)",
            "waiting": "sum(vllm:num_requests_waiting)",
            "programs that wait to start": "sum(continuum_programs_held)",
        },
    ),
    Panel(
        "GPU KV cache",
        "percentunit",
        {"in use": "avg(vllm:kv_cache_usage_perc)", "pinned": "avg(continuum_pinned_ratio)"},
        "pinned blocks are part of those in use",
    ),
    Panel(
        "Working set and room for it",
        "short",
        {
            "all contexts": "sum(continuum_working_set_tokens)",
            "gpu": "sum(continuum_gpu_capacity_tokens)",
            "{{tier}}": "sum by (tier) (continuum_tier_capacity_tokens)",
        },
        "tokens",
    ),
    Panel(
        "Where returning contexts were",
        "percentunit",
        {
            "{{tier}}": f"{rate('continuum_returned_context_tokens_total', 'tier')} / ignoring(tier) "
            f"group_left {rate('continuum_returned_context_tokens_total')}"
        },
        "none: computed again",
    ),
    Panel(
        "Pins", "ops", {"{{outcome}}": rate("continuum_pins_total", "outcome")}, "taken, and ended by outcome"
    ),
    Panel(
        "TTL and tool gap, median",
        "s",
        {
            "ttl {{tool}}": quantile(0.5, "continuum_ttl_seconds", "tool"),
            "gap {{tool}}": quantile(0.5, "continuum_tool_gap_seconds", "tool"),
        },
    ),
    Panel(
        "Queueing delay of programs' turns",
        "s",
        {
            "P50, context {{context}}": quantile(0.5, "continuum_queue_delay_seconds", "context"),
            "P95, context {{context}}": quantile(0.95, "continuum_queue_delay_seconds", "context"),
            "T of eq. 2": "avg(continuum_eviction_delay_seconds)",
        },
    ),
    Panel(
        "Reasons of decisions",
        "ops",
        {
            "TTL: {{reason}}": rate("continuum_ttl_decisions_total", "reason"),
            "load: {{decision}}": rate("continuum_load_decisions_total", "decision"),
            "refused: {{reason}}": rate("continuum_pins_refused_total", "reason"),
        },
    ),
    Panel(
        "Tokens loaded a second",
        "short",
        {"{{tier}}": rate("continuum_loaded_tokens_total", "tier")},
    ),
    Panel(
        "Steps that wait for KV",
        "percentunit",
        {
            "loads from {{tier}}": rate("continuum_load_seconds_total", "tier"),
            "stores": rate("continuum_store_seconds_total"),
        },
        "share of the time",
    ),
    Panel(
        "First token, and preemptions",
        "s",
        {
            "TTFT P50": quantile(0.5, TTFT),
            "TTFT P95": quantile(0.95, TTFT),
            "preemptions a second": rate("vllm:num_preemptions_total"),
        },
    ),
    Panel(
        "Fleet: replicas' first tokens",
        "s",
        {
            f"{name} of the replicas' P90": f"quantile({q}, {quantile(0.9, TTFT, 'replica')})"
            for q, name in ((0.5, "median"), (1, "largest"))
        },
        "one replica that is far above the median is overloaded (docs/ray.md has the label replica)",
    ),
    Panel(
        "Fleet: room for new programs",
        "short",
        {"replica {{replica}}": "continuum_fleet_replica_headroom_tokens"},
        "tokens",
    ),
    Panel(
        "Fleet: the line of new programs",
        "short",
        {
            "programs in it": "continuum_fleet_line",
            "seconds the first has waited": "continuum_fleet_line_wait_seconds",
            "refused a second": rate("continuum_fleet_refused_total"),
        },
    ),
    Panel(
        "Fleet: where turns went",
        "ops",
        {"{{why}}": rate("continuum_fleet_turns_total", "why")},
        "moved and rehomed: a program left its replica",
    ),
)


def panel_json(panel: Panel, number: int, kind: str, place: dict[str, int]) -> dict[str, Any]:
    """One panel as Grafana has it."""
    targets = [
        {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": query, "legendFormat": legend or "__auto"}
        for i, (legend, query) in enumerate(panel.queries.items())
    ]
    stat = {"colorMode": "none", "textMode": "value_and_name" if len(panel.title) > 20 else "auto"}
    return {
        "id": number,
        "type": kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": stat if kind == "stat" else {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": targets,
    }


def dashboard() -> dict[str, Any]:
    """The whole screen."""
    width = COLUMNS // len(STATS)
    panels = [
        panel_json(p, i + 1, "stat", {"x": width * i, "y": 0, "w": width, "h": STAT_HEIGHT})
        for i, p in enumerate(STATS)
    ]
    for i, panel in enumerate(PANELS):
        row, column = divmod(i, 4)
        place = {"x": 6 * column, "y": STAT_HEIGHT + PANEL_HEIGHT * row, "w": 6, "h": PANEL_HEIGHT}
        panels.append(panel_json(panel, len(STATS) + i + 1, "timeseries", place))
    source = {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    return {
        "uid": "continuum-lmcache",
        "title": "continuum-lmcache: one server",
        "tags": ["vllm", "lmcache", "continuum"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-15m", "to": "now"},
        "templating": {"list": [source]},
        "panels": panels,
    }


def text() -> str:
    """The file's content."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    DASHBOARD.write_text(text())
