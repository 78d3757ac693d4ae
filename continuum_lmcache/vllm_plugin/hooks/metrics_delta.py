"""One engine's figures for the metrics: totals, gauges, and what changed since the last report."""

from __future__ import annotations

from continuum_lmcache.programs.program import Stage
from continuum_lmcache.reload.rate_calibration import CalibratedCosts
from continuum_lmcache.types import PinEnd
from continuum_lmcache.vllm_plugin.assembly import EngineParts
from continuum_lmcache.vllm_plugin.hooks.prometheus import COUNTERS, MetricsPayload

Totals = dict[str, dict[str, float]]  # by metric (prometheus.py), then by its label
# reading an enum's value takes longer than a dict lookup
OUTCOMES = {outcome: outcome.value for outcome in PinEnd}
REFUSALS = {"budget": 0.0, "tenant": 0.0}  # shown as 0 from the start


class MetricsDelta:
    """The changes in one engine since its last report: growth of counts, changed gauges, new samples.

    vLLM sends each step's stats to any one of its API servers, and Prometheus adds these up. So every event
    must be reported once: a total would be counted by each API server that gets one.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts, self._samples = parts, parts.samples
        self._before: Totals = {}

    def delta(self) -> MetricsPayload:
        """The changes since the last call."""
        now, before = totals_of(self._parts), self._before
        changed: MetricsPayload = {}
        for key, figures in now.items():
            old = before.get(key, {})
            if figures == old:  # of some thirty metrics few change in a step, and this runs in each
                continue
            is_count = key in COUNTERS
            moved = {
                label: v - old.get(label, 0.0) if is_count else v
                for label, v in figures.items()
                if v != old.get(label)
            }
            if moved:
                changed[key] = moved
        self._before = now
        return {**changed, **self._samples.take_samples()}


def totals_of(parts: EngineParts) -> Totals:
    """All figures of the engine now."""
    engine, residency, samples = parts.engine, parts.residency, parts.samples
    pins, programs, advisor = engine.pins, engine.programs, engine.advisor
    ends: dict[str, float] = {name: pins.outcomes[outcome] for outcome, name in OUTCOMES.items()}
    return {
        "pins": {"taken": pins.taken, **ends},
        "pins_refused": REFUSALS | pins.refused,
        "ttl_decisions": dict(samples.decisions),
        "ignored_fields": dict(parts.ignored),
        "pinned_blocks": {"": pins.pinned_blocks},
        "programs": {"": len(programs.records) - programs.one_turn},
        "tier_store_up": {"": float(residency.store.is_up)},
        "tier_store_info": {residency.mode: 1.0},
        "load_decisions": dict(engine.load_policy.counts),
        "policy_info": {advisor.config.policy: 1.0},
        "tier_capacity_tokens": {t.value: n for t, n in residency.store.capacity_tokens().items()},
        "prompt_tokens": dict(residency.prompt_tokens),
        "returned_context_tokens": dict(residency.returned_tokens),
        **rate_totals(advisor.rates),
        "eviction_delay_seconds": {"": advisor.queue_delay_s},
        "programs_held": {"": programs.in_stage[Stage.IN_LINE]},
        "longest_wait_seconds": {"": engine.admission.longest_wait_s},
        "working_set_tokens": {"": programs.context_tokens},
        "gpu_capacity_tokens": {"": engine.kv_tokens},
        "lost_returns": dict(samples.lost_returns),
        "lost_tokens": dict(samples.lost_tokens),
    }


def rate_totals(rates: CalibratedCosts) -> Totals:
    """Every rate in use, and its number of measurements."""
    costs = rates.costs
    curve, tiers = costs.prefill, {"dram": costs.dram, "ssd": costs.ssd}
    return {
        "rate_samples": {name: float(n) for name, n in rates.samples.items()},
        "tier_bytes_per_second": {tier: rate.bytes_per_s for tier, rate in tiers.items()},
        "prefill_fixed_seconds": {"": curve.fixed_s},
        "prefill_seconds_per_token": {"": curve.per_token_s},
        "prefill_seconds_per_token_pair": {"": curve.per_pair_s},
    }
