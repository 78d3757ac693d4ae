"""Two scrapes of /metrics, some seconds apart, as the ServerWindow that the core's rules check."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from continuum_lmcache.console.metrics_page import MetricsPage
from continuum_lmcache.errors import ServerError
from continuum_lmcache.telemetry.health_rules import ServerWindow


@dataclass(frozen=True, slots=True)
class ScrapePair:
    """Two pages, the earlier first."""

    before: MetricsPage
    after: MetricsPage

    def growth(self, name: str) -> float | None:
        """The growth of a counter. Raises ServerError if it fell."""
        first, last = self.before.total(name), self.after.total(name)
        if last is None:
            return None
        if last < (first or 0.0):
            raise ServerError(f"{name} fell from {first:g} to {last:g}: the server restarted; try again")
        return last - (first or 0.0)

    def growth_by(self, name: str, label: str) -> Mapping[str, float]:
        """The same by a label."""
        first, last = self.before.by(name, label), self.after.by(name, label)
        return {key: value - first.get(key, 0.0) for key, value in last.items()}

    def between(self, name: str) -> float | None:
        """A gauge: the mean over both pages, summed over engines."""
        return halfway(self.before.total(name), self.after.total(name))

    def average(self, histogram: str) -> float | None:
        """A histogram's mean over the new samples; None if there are none."""
        total, n = self.growth(f"{histogram}_sum"), self.growth(f"{histogram}_count")
        return total / n if total is not None and n else None

    def share_of_blocks(self, name: str) -> float | None:
        """A gauge now, over all blocks of all engines."""
        blocks = self.after.total(name)
        sizes = [labels.get("num_gpu_blocks", "") for labels, _ in self.after.of("vllm:cache_config_info")]
        total = sum(int(size) for size in sizes if size.isdecimal())
        return blocks / total if blocks is not None and total else None

    def samples(self, name: str) -> dict[str, float]:
        """Measurements of each rate, by the label that distinguishes rates; the least over engines."""
        found: dict[str, float] = {}
        for labels, value in self.after.of(name):
            label_values = [v for k, v in sorted(labels.items()) if k not in ("engine", "model_name")]
            rate = " ".join(label_values) or "a rate"
            found[rate] = min(value, found.get(rate, value))
        return found


Read = Callable[[ScrapePair, str], Any]
FIELDS: Mapping[str, tuple[str, Read]] = {  # of a window -> its metric, and how that is read
    "running_turns": ("vllm:num_requests_running", ScrapePair.between),
    "waiting_turns": ("vllm:num_requests_waiting", ScrapePair.between),
    "kv_usage": (
        "vllm:kv_cache_usage_perc",
        lambda pair, name: halfway(pair.before.mean(name), pair.after.mean(name)),
    ),
    "pinned_share": ("continuum_pinned_blocks", ScrapePair.share_of_blocks),
    "finished_turns": ("vllm:request_success_total", ScrapePair.growth),
    "preemptions": ("vllm:num_preemptions_total", ScrapePair.growth),
    "queue_s": ("vllm:request_queue_time_seconds", ScrapePair.average),
    "prefill_s": ("vllm:request_prefill_time_seconds_sum", ScrapePair.growth),
    "computed_tokens": (
        "continuum_prompt_tokens_total",
        lambda pair, name: pair.growth_by(name, "tier").get("none"),
    ),
    "programs": ("continuum_programs", lambda pair, name: pair.after.total(name)),
    "context_tokens": ("vllm:request_prompt_tokens", ScrapePair.average),
    "working_set_tokens": ("continuum_working_set_tokens", lambda pair, name: pair.after.total(name)),
    "tier_capacity_tokens": (
        "continuum_tier_capacity_tokens",
        lambda pair, name: pair.after.by(name, "tier"),
    ),
    "queried_tokens": ("vllm:external_prefix_cache_queries_total", ScrapePair.growth),
    "loaded_tokens": ("continuum_loaded_tokens_total", lambda pair, name: pair.growth_by(name, "tier")),
    "load_s": ("continuum_load_seconds_total", lambda pair, name: pair.growth_by(name, "tier")),
    "store_s": ("continuum_store_seconds_total", ScrapePair.growth),
    "load_decisions": ("continuum_load_decisions_total", lambda pair, name: pair.growth_by(name, "decision")),
    "rate_samples": ("continuum_rate_samples", ScrapePair.samples),
    "tier_store_up": ("continuum_tier_store_up", lambda pair, name: pair.after.least(name)),
    "lost_s": ("continuum_lost_prefill_seconds_total", lambda pair, name: pair.growth_by(name, "cause")),
    "lost_returns": ("continuum_lost_returns_total", lambda pair, name: pair.growth_by(name, "cause")),
    "lost_at_token": ("continuum_lost_at_token", lambda pair, name: pair.after.by(name, "cause")),
}
METRICS = {field: metric for field, (metric, _) in FIELDS.items()}


def window(before: MetricsPage, after: MetricsPage, seconds: float) -> ServerWindow:
    """The server's figures of these seconds. Raises ServerError if it restarted meanwhile."""
    pair = ScrapePair(before, after)
    return ServerWindow(seconds, **{field: read(pair, metric) for field, (metric, read) in FIELDS.items()})


def halfway(first: float | None, last: float | None) -> float | None:
    if last is None:
        return None
    return last if first is None else (first + last) / 2
