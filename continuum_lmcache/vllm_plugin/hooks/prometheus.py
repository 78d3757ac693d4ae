"""Adds the scheduler's metrics to vLLM's own /metrics.

They are sent under the key "continuum" in SchedulerStats.kv_connector_stats, the one field that vLLM passes
on unchanged. They are removed before vLLM's loggers read it. Seam, read on vLLM 0.30
to 0.33: StatLoggerManager.record. vLLM sends a step's stats to one of its API servers. Each message
has the changes since the last one (metrics_delta.py), so the counts of several servers add up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

from prometheus_client import Counter, Gauge, Histogram
from vllm.v1.metrics.stats import SchedulerStats

from continuum_lmcache.vllm_plugin.hooks import wrapping

KEY = "continuum"
MetricsPayload = dict[str, Any]
"""By metric, then label: a count's growth, a gauge's value, a histogram's samples."""
TTL_BUCKETS_S = (0.0, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
GAP_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
DELAY_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metric(NamedTuple):
    """One metric, by its name without "continuum_", which is the report's key."""

    kind: type[Counter] | type[Gauge] | type[Histogram]
    text: str
    label: str = ""  # beside the engine; "": none
    more: Mapping[str, Any] = {}


def histogram(text: str, buckets_s: tuple[float, ...], label: str = "") -> Metric:
    """With the upper bounds of its buckets."""
    return Metric(Histogram, text, label, {"buckets": buckets_s})


gauge = partial(Metric, Gauge, more={"multiprocess_mode": "mostrecent"})
counter = partial(Metric, Counter)
PAIR = "Prefill curve: seconds per pair of a new token and one that it attends to"
LONGEST = "How long a program that comes now waits for a place at most; 0: a usual one starts at once"
IN_TIME = "Live programs that would have nine of ten first tokens within first_token_limit_s"
LOST = "Tokens of the last turn that returns compute again, at most, by cause and the third where that begins"
DELAY = "Queueing delay of programs' turns, by whether the GPU had lost their context"
METRICS = {
    "pins": counter("Pins by outcome; `taken` counts all", "outcome"),
    "pins_refused": counter("Pins refused by a limit", "reason"),
    "prompt_tokens": counter("Prompt tokens by the source of their KV", "tier"),
    "returned_context_tokens": counter(
        "Context tokens of returning programs by where their KV was found", "tier"
    ),
    "ttl_decisions": counter("Finished turns by the reason of their TTL", "reason"),
    "place_decisions": counter("Programs started, held, and places kept or given up, by reason", "reason"),
    "ignored_fields": counter("Requests with an ignored field, by field", "field"),
    "new_weights": counter("Calls after which earlier KV is not used again, by call", "call"),
    "unnamed_prompts": counter("Prompts without a name, by whether they continue a turn", "outcome"),
    "lost_tokens": counter(LOST, "cause"),
    "load_decisions": counter("Turns for which a tier had KV, by what was decided", "decision"),
    "pinned_blocks": gauge("GPU KV blocks held by pins"),
    "programs": gauge("Programs known to the scheduler"),
    "tier_store_up": gauge("1 while the tiers' store answers, else 0; missing: no tier"),
    "tier_faults": counter("Chunks that a disk lost (damaged_chunk) or did not take (failed_store)", "fault"),
    "tier_store_info": gauge("Always 1; its label names the tiers' store", "mode"),
    "rate_samples": gauge("Measurements of a rate; 0: it is assumed", "rate"),
    "tier_bytes_per_second": gauge("Rate at which a tier is read, as used in decisions", "tier"),
    "prefill_fixed_seconds": gauge("Prefill curve: the fixed part of a prefill"),
    "prefill_seconds_per_token": gauge("Prefill curve: seconds per new token"),
    "prefill_seconds_per_token_pair": gauge(PAIR),
    "tier_capacity_tokens": gauge("Tokens that a tier holds before it evicts", "tier"),
    "eviction_delay_seconds": gauge("T of eq. 2: mean queueing delay of turns whose KV was evicted"),
    "policy_info": gauge("Always 1; its label is the policy", "policy"),
    "working_set_tokens": gauge("Sum of the contexts of all programs that are expected to continue"),
    "gpu_capacity_tokens": gauge("Capacity of the GPU's KV cache in tokens"),
    "programs_held": gauge("Programs that wait in admission's line for a place"),
    "live_programs": gauge("Programs with a turn here, or in a tool call and expected back"),
    "programs_in_time": gauge(IN_TIME),
    "longest_wait_seconds": gauge(LONGEST),
    "ttl_seconds": histogram("TTL of finished turns", TTL_BUCKETS_S),
    "tool_gap_seconds": histogram("Time from a turn's end to the program's next turn", GAP_BUCKETS_S),
    "queue_delay_seconds": histogram(DELAY, DELAY_BUCKETS_S, "context"),
}


def attach(stats: SchedulerStats, payload: MetricsPayload) -> SchedulerStats:
    stats.kv_connector_stats = {**(stats.kv_connector_stats or {}), KEY: payload}
    return stats


def detach(stats: SchedulerStats | None) -> MetricsPayload:
    """Remove our metrics and leave the field as vLLM expects it."""
    carried = stats.kv_connector_stats if stats is not None else None
    if stats is None or not carried or KEY not in carried:
        return {}
    rest = {k: v for k, v in carried.items() if k != KEY}
    stats.kv_connector_stats = rest or None
    return dict(carried[KEY])


def observe(payload: MetricsPayload, engine: int) -> None:
    """Advance this process's counters, set its gauges, add the samples."""
    for key, by_label in payload.items():
        for label, reported in by_label.items():
            update = updater(key, label, engine)
            for value in reported if METRICS[key].kind is Histogram else (reported,):
                update(value)


@cache  # prometheus_client looks labels up under a lock
def updater(key: str, label: str, engine: int) -> Callable[[float], None]:
    metric = metrics()[key].labels(*([label] if label else []), str(engine))
    if isinstance(metric, Counter):
        return metric.inc
    return metric.set if isinstance(metric, Gauge) else metric.observe


@cache  # Prometheus refuses a name twice
def metrics() -> dict[str, Counter | Gauge | Histogram]:
    return {
        key: kind(f"continuum_{key}", text, [*([label] if label else []), "engine"], **more)
        for key, (kind, text, label, more) in METRICS.items()
    }


def install() -> None:
    """Make this API server read our metrics; a second call changes nothing."""
    from vllm.v1.metrics.loggers import StatLoggerManager

    stock = StatLoggerManager.record

    @wrapping.hook(StatLoggerManager)
    def record(self: Any, scheduler_stats: Any, *args: Any, **kwargs: Any) -> Any:
        observe(detach(scheduler_stats), kwargs.get("engine_idx") or 0)
        return stock(self, scheduler_stats, *args, **kwargs)
