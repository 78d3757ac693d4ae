"""One engine's figures for the metrics: totals, gauges, and what changed since the last report."""

from __future__ import annotations

from prometheus_client import Counter

from continuum_lmcache.programs.program import Stage
from continuum_lmcache.types import PinEnd
from continuum_lmcache.vllm_plugin.assembly import EngineParts
from continuum_lmcache.vllm_plugin.hooks.prometheus import METRICS, MetricsPayload

Totals = dict[str, dict[str, float]]  # by metric (prometheus.py), then by its label


class MetricsDelta:
    """The changes in one engine since its last report: growth of counts, changed gauges, new samples. So each
    event is reported once, whichever API server gets it (hooks/prometheus.py)."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts, self._samples = parts, parts.samples
        self._before: Totals = {}

    def delta(self) -> MetricsPayload:
        """The changes since the last call."""
        now, changed = totals_of(self._parts), MetricsPayload()
        for key, figures in now.items():
            old, is_count = self._before.get(key, {}), METRICS[key].kind is Counter
            moved = {label: v for label, v in figures.items() if v != old.get(label)}
            if moved:
                changed[key] = {n: v - old.get(n, 0.0) for n, v in moved.items()} if is_count else moved
        self._before = now
        return changed | self._samples.take_samples()


def totals_of(parts: EngineParts) -> Totals:
    """All figures of the engine now."""
    engine, residency, samples = parts.engine, parts.residency, parts.samples
    pins, programs, learned = engine.pins, engine.programs, engine.learned
    rates, costs, in_time = learned.rates, learned.rates.costs, engine.admission.programs_in_time
    return {
        "pins": {"taken": pins.taken, **{outcome.value: pins.outcomes[outcome] for outcome in PinEnd}},
        "pins_refused": dict(pins.refused),
        "ttl_decisions": dict(samples.decisions),
        "place_decisions": dict(samples.places),
        "ignored_fields": dict(parts.ignored),
        "new_weights": dict(parts.new_weights),
        "unnamed_prompts": dict(engine.linker.unnamed),
        "pinned_blocks": {"": pins.pinned_blocks},
        "programs": {"": len(programs.records) - programs.one_turn},
        "tier_store_up": {"": float(residency.store.is_up)} if residency.has_tiers else {},
        "tier_faults": dict(residency.store.faults()),
        "tier_store_info": {residency.mode: 1.0},
        "load_decisions": dict(engine.load_policy.counts),
        "policy_info": {engine.config.policy: 1.0},
        "tier_capacity_tokens": {t.value: n for t, n in residency.store.capacity_tokens().items()},
        "prompt_tokens": dict(residency.prompt_tokens),
        "returned_context_tokens": dict(residency.returned_tokens),
        "rate_samples": {name: float(n) for name, n in rates.samples.items()},
        "tier_bytes_per_second": {"dram": costs.dram.bytes_per_s, "ssd": costs.ssd.bytes_per_s},
        "prefill_fixed_seconds": {"": costs.prefill.fixed_s},
        "prefill_seconds_per_token": {"": costs.prefill.per_token_s},
        "prefill_seconds_per_token_pair": {"": costs.prefill.per_pair_s},
        "eviction_delay_seconds": {"": learned.queue_delay_s},
        "programs_held": {"": programs.in_stage[Stage.IN_LINE]},
        "live_programs": {"": programs.live},
        "programs_in_time": {} if in_time is None else {"": in_time},
        "longest_wait_seconds": {"": engine.admission.longest_wait_s},
        "working_set_tokens": {"": programs.context_tokens},
        "gpu_capacity_tokens": {"": engine.kv_tokens},
        "lost_tokens": dict(samples.lost_tokens),
    }
