"""Every rate in /metrics, with its number of measurements."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench import Bench
from prometheus_client import REGISTRY

from continuum_lmcache.reload.tier_store import KVTransfer
from continuum_lmcache.types import Tier
from continuum_lmcache.vllm_plugin.hooks.prometheus import observe
from continuum_lmcache.vllm_plugin.metrics_delta import totals_of
from continuum_lmcache.vllm_plugin.scheduler import ContinuumScheduler

ENGINE = 97  # no other test uses it
RATES = ("rate_", "tier_bytes_", "prefill_")


def gauge(name: str, **labels: str) -> float:
    value = REGISTRY.get_sample_value(name, {**labels, "engine": str(ENGINE)})
    assert value is not None, f"{name} {labels} is not exported"
    return value


def test_a_rate_is_never_shown_without_its_samples_and_0_means_assumed(model: Path) -> None:
    bench = Bench(ContinuumScheduler, model)
    rates = bench.engine.learned.rates
    for _ in range(5):
        rates.observe(KVTransfer(Tier.SSD, 1000, 10**9, 10.0))
    rates.observe_prefill(took_s=1.0, predicted_s=0.5)
    observe({key: found for key, found in totals_of(bench.parts).items() if key.startswith(RATES)}, ENGINE)
    samples = {r: gauge("continuum_rate_samples", rate=r) for r in ("prefill", "dram", "ssd")}
    assert samples == {"prefill": 1, "dram": 0, "ssd": 5}
    assert gauge("continuum_tier_bytes_per_second", tier="dram") == rates.costs.dram.bytes_per_s
    assert gauge("continuum_tier_bytes_per_second", tier="ssd") == pytest.approx(1e8, rel=0.3)
    assert gauge("continuum_prefill_seconds_per_token") == rates.costs.prefill.per_token_s
