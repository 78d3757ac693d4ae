"""Two scrapes of /metrics, some seconds apart, as the ServerWindow that the core's rules check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from continuum_lmcache.console.metrics_page import MetricsPage
from continuum_lmcache.errors import ServerError
from continuum_lmcache.telemetry.health_rules import ServerWindow

METRICS = {  # the metrics that each field of a window is read from
    "running_turns": "vllm:num_requests_running",
    "waiting_turns": "vllm:num_requests_waiting",
    "kv_usage": "vllm:kv_cache_usage_perc",
    "pinned_share": "continuum_pinned_blocks",
    "finished_turns": "vllm:request_success_total",
    "preemptions": "vllm:num_preemptions_total",
    "queue_s": "vllm:request_queue_time_seconds",
    "prefill_s": "vllm:request_prefill_time_seconds_sum",
    "computed_tokens": "continuum_prompt_tokens_total",
    "programs": "continuum_programs",
    "context_tokens": "vllm:request_prompt_tokens",
    "working_set_tokens": "continuum_working_set_tokens",
    "tier_capacity_tokens": "continuum_tier_capacity_tokens",
    "asked_tokens": "vllm:external_prefix_cache_queries_total",
    "loaded_tokens": "continuum_loaded_tokens_total",
    "load_s": "continuum_load_seconds_total",
    "store_s": "continuum_store_seconds_total",
    "load_decisions": "continuum_load_decisions_total",
    "rate_samples": "continuum_rate_samples",
    "tier_store_up": "continuum_tier_store_up",
    "lost_s": "continuum_lost_prefill_seconds_total",
    "lost_returns": "continuum_lost_returns_total",
    "lost_at_token": "continuum_lost_at_token",
}


@dataclass(frozen=True, slots=True)
class ScrapePair:
    """Two pages, the earlier first."""

    before: MetricsPage
    after: MetricsPage

    def grown(self, name: str) -> float | None:
        """The growth of a counter. Raises ServerError if it fell."""
        first, last = self.before.total(name), self.after.total(name)
        if last is None:
            return None
        if last < (first or 0.0):
            raise ServerError(
                f"{name} fell from {first:g} to {last:g}: the server restarted meanwhile; try again"
            )
        return last - (first or 0.0)

    def grown_by(self, name: str, label: str) -> Mapping[str, float]:
        """The same by a label."""
        first, last = self.before.by(name, label), self.after.by(name, label)
        return {key: value - first.get(key, 0.0) for key, value in last.items()}

    def between(self, name: str) -> float | None:
        """A gauge: the mean over both pages, summed over engines."""
        return halfway(self.before.total(name), self.after.total(name))

    def average(self, histogram: str) -> float | None:
        """A histogram's mean over the new samples; None if there are none."""
        total, n = self.grown(f"{histogram}_sum"), self.grown(f"{histogram}_count")
        return total / n if total is not None and n else None


def window(before: MetricsPage, after: MetricsPage, seconds: float) -> ServerWindow:
    """The server's figures of these seconds. Raises ServerError if it restarted meanwhile."""
    pair = ScrapePair(before, after)
    computed = after.by(METRICS["computed_tokens"], "tier")
    return ServerWindow(
        seconds,
        running_turns=pair.between(METRICS["running_turns"]),
        waiting_turns=pair.between(METRICS["waiting_turns"]),
        kv_usage=halfway(before.mean(METRICS["kv_usage"]), after.mean(METRICS["kv_usage"])),
        pinned_share=pinned_share(after),
        finished_turns=pair.grown(METRICS["finished_turns"]),
        preemptions=pair.grown(METRICS["preemptions"]),
        queue_s=pair.average(METRICS["queue_s"]),
        prefill_s=pair.grown(METRICS["prefill_s"]),
        computed_tokens=pair.grown_by(METRICS["computed_tokens"], "tier").get("none") if computed else None,
        programs=after.total(METRICS["programs"]),
        context_tokens=pair.average(METRICS["context_tokens"]),
        working_set_tokens=after.total(METRICS["working_set_tokens"]),
        tier_capacity_tokens=after.by(METRICS["tier_capacity_tokens"], "tier"),
        asked_tokens=pair.grown(METRICS["asked_tokens"]),
        loaded_tokens=pair.grown_by(METRICS["loaded_tokens"], "tier"),
        load_s=pair.grown_by(METRICS["load_s"], "tier"),
        store_s=pair.grown(METRICS["store_s"]),
        load_decisions=pair.grown_by(METRICS["load_decisions"], "decision"),
        rate_samples=samples(after),
        tier_store_up=after.least(METRICS["tier_store_up"]),
        lost_s=pair.grown_by(METRICS["lost_s"], "cause"),
        lost_returns=pair.grown_by(METRICS["lost_returns"], "cause"),
        lost_at_token=after.by(METRICS["lost_at_token"], "cause"),
    )


def halfway(first: float | None, last: float | None) -> float | None:
    if last is None:
        return None
    return last if first is None else (first + last) / 2


def pinned_share(page: MetricsPage) -> float | None:
    """Pinned blocks over all blocks of all engines."""
    pinned = page.total(METRICS["pinned_share"])
    sizes = [labels.get("num_gpu_blocks", "") for labels, _ in page.of("vllm:cache_config_info")]
    blocks = sum(int(size) for size in sizes if size.isdecimal())
    return pinned / blocks if pinned is not None and blocks else None


def samples(page: MetricsPage) -> dict[str, float]:
    """Measurements of each rate, by the label that distinguishes rates; the least over engines."""
    found: dict[str, float] = {}
    for labels, value in page.of(METRICS["rate_samples"]):
        name = " ".join(v for k, v in sorted(labels.items()) if k not in ("engine", "model_name")) or "a rate"
        found[name] = min(value, found.get(name, value))
    return found
