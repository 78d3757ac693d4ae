"""The scheduler's counts in vLLM's own /metrics.

They travel inside SchedulerStats.kv_connector_stats under the key "continuum", the one field vLLM
passes on untouched, and are taken out again before vLLM's loggers see it. Seam, read on vLLM 0.30
to 0.33: StatLoggerManager.record. Counts are totals since the engine's start, so a lost message
costs nothing.
"""

from __future__ import annotations

import functools
from typing import Any

from prometheus_client import Counter, Gauge

from continuum_lmcache.vllm_plugin.totals import Totals

KEY = "continuum"

COUNTERS = {
    "pins": ("continuum_pins", "Pins by what became of them; taken counts all", "outcome"),
    "refused": ("continuum_pins_refused", "Pins that a limit did not allow", "reason"),
    "prompt_tokens": ("continuum_prompt_tokens", "Prompt tokens by where their KV came from", "tier"),
    "ignored": ("continuum_ignored_fields", "Requests whose program fields were not usable", "field"),
    "unrecorded": ("continuum_unrecorded", "Events or snapshots that reached no file", "kind"),
    "load_decisions": ("continuum_load_decisions", "Turns that a tier had KV for, as placed", "decision"),
}
GAUGES = {  # the label's name last; "" where there is none
    "pinned_blocks": ("continuum_pinned_blocks", "GPU KV blocks held by pins", ""),
    "programs": ("continuum_programs", "Programs known to the scheduler", ""),
    "store_up": ("continuum_tier_store_up", "1 while the store below the GPU answers, else 0", ""),
    "store_mode": ("continuum_tier_store_info", "Always 1; its label says who keeps KV off the GPU", "mode"),
    "rate_samples": ("continuum_rate_samples", "Measurements behind a rate; 0: it is assumed", "rate"),
    "tier_rate": ("continuum_tier_bytes_per_second", "How fast a tier is taken to be read", "tier"),
    "tier_fixed": ("continuum_tier_fixed_seconds", "What a load from a tier takes beside its bytes", "tier"),
    "prefill": ("continuum_prefill_seconds", "The prefill curve: fixed, per token, per pair", "part"),
    "store_stall": ("continuum_store_stall_seconds_per_byte", "How long a step waits for its stores", ""),
    "residency": ("continuum_residency_source", "1 for how it is known where KV lies", "source"),
    "hit_share": ("continuum_learned_hit_share", "Of lost context, brought back by a connector", ""),
    "outside": ("continuum_programs_outside", "Programs that wait until there is room to start", ""),
    "crowded": ("continuum_crowded", "1 while contexts compete for the GPU's KV cache, else 0", ""),
    "storing": ("continuum_storing", "1 while KV is stored to the tiers, 0 while that does not pay", ""),
}


def attach(stats: Any, totals: Totals) -> Any:
    """The scheduler's stats with our totals aboard."""
    stats.kv_connector_stats = {**(stats.kv_connector_stats or {}), KEY: totals}
    return stats


def detach(stats: Any) -> Totals:
    """Take our totals out again and leave the field as vLLM expects it."""
    aboard = getattr(stats, "kv_connector_stats", None)
    if not aboard or KEY not in aboard:
        return {}
    rest = {k: v for k, v in aboard.items() if k != KEY}
    stats.kv_connector_stats = rest or None
    return dict(aboard[KEY])


class Exporter:
    """Prometheus metrics of this process, fed with each engine's totals."""

    def __init__(self) -> None:
        self._counters = {
            key: Counter(name, text, [label, "engine"]) for key, (name, text, label) in COUNTERS.items()
        }
        self._gauges = {
            key: Gauge(name, text, [*([label] if label else []), "engine"], multiprocess_mode="mostrecent")
            for key, (name, text, label) in GAUGES.items()
        }
        self._seen: dict[tuple[str, str, int], float] = {}

    def observe(self, totals: Totals, engine: int) -> None:
        """Advance the counters to `totals`, set the gauges."""
        for key, counter in self._counters.items():
            for value, total in totals.get(key, {}).items():
                before = self._seen.get((key, value, engine), 0.0)
                counter.labels(value, str(engine)).inc(max(0.0, total - before))
                self._seen[key, value, engine] = total
        for key, gauge in self._gauges.items():
            for value, amount in totals.get(key, {}).items():
                gauge.labels(*([value] if value else []), str(engine)).set(amount)


@functools.cache
def exporter() -> Exporter:
    """The one of this process: Prometheus refuses a name twice."""
    return Exporter()


def install() -> None:
    """Read our totals in this API server, once."""
    from vllm.v1.metrics.loggers import StatLoggerManager

    stock = StatLoggerManager.record
    if hasattr(stock, "__wrapped__"):
        return

    @functools.wraps(stock)
    def record(self: Any, scheduler_stats: Any, *args: Any, **kwargs: Any) -> Any:
        totals = detach(scheduler_stats)
        if totals:
            exporter().observe(totals, kwargs.get("engine_idx") or 0)
        return stock(self, scheduler_stats, *args, **kwargs)

    StatLoggerManager.record = record  # type: ignore[method-assign]
