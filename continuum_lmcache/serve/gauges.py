"""A replica's report, from the metrics that vLLM and this package keep in its process (docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import REGISTRY

from continuum_lmcache.fleet.report import ReplicaId, ReplicaReport
from continuum_lmcache.reload.cost_model import UNMEASURED, CostModel, PrefillCurve, TransferRate

REQUESTS = ("vllm:num_requests_waiting", "vllm:num_requests_running")
CAPACITY, HELD = "continuum_gpu_capacity_tokens", "continuum_programs_held"
HEADROOM, WAIT = "continuum_admission_headroom_tokens", "continuum_oldest_returning_wait_seconds"
TIER = "continuum_tier_capacity_tokens"
TIER_RATE, TIER_FIXED = "continuum_tier_bytes_per_second", "continuum_tier_fixed_seconds"
SAMPLES, KV_BYTES = "continuum_rate_samples", "continuum_kv_bytes_per_token"
CURVE = (
    "continuum_prefill_fixed_seconds",
    "continuum_prefill_seconds_per_token",
    "continuum_prefill_seconds_per_token_pair",
)
NAMES = (*REQUESTS, CAPACITY, HELD, HEADROOM, WAIT, TIER, TIER_RATE, TIER_FIXED, SAMPLES, KV_BYTES, *CURVE)
OF_THE_PROCESS = {"engine", "model_name"}  # labels without information: there is one engine
GaugeValues = Mapping[tuple[str, str], float]
"""By name, and the value of the label that is the metric's own; "" where it has none."""


def read_gauges() -> GaugeValues:
    """The gauges of this process; a missing gauge has no entry."""
    found: dict[tuple[str, str], float] = {}
    for family in REGISTRY.restricted_registry(NAMES).collect():
        for sample in family.samples:
            label = next((v for k, v in sample.labels.items() if k not in OF_THE_PROCESS), "")
            found[sample.name, label] = sample.value
    return found


def replica_report(replica: str, gpu_tokens: int, gauges: GaugeValues) -> ReplicaReport:
    """The replica's report; the state adds the time. `gpu_tokens`: as vLLM found at its start."""
    is_continuum = (CAPACITY, "") in gauges
    return ReplicaReport(
        ReplicaId(replica),
        at_s=0.0,
        gpu_tokens=int(gauges.get((CAPACITY, ""), gpu_tokens)),
        requests=int(sum(gauges.get((each, ""), 0.0) for each in REQUESTS)),
        tier_tokens=int(max((tokens for (name, _), tokens in gauges.items() if name == TIER), default=0)),
        headroom_tokens=gauges.get((HEADROOM, "")),
        pending_programs=int(gauges.get((HELD, ""), 0.0)),
        oldest_returning_wait_s=gauges.get((WAIT, ""), 0.0),
        returning_first=is_continuum,
        costs=costs(gauges),
    )


def costs(gauges: GaugeValues) -> CostModel:
    """The rates that the engine has measured or assumed; for an engine without rates the assumed ones."""
    values = [gauges.get((name, "")) for name in (*CURVE, KV_BYTES)]
    if any(value is None for value in values):
        return UNMEASURED
    fixed_s, token_s, pair_s, kv_bytes = (value or 0.0 for value in values)
    tiers = {}
    for tier in ("dram", "ssd"):
        bytes_per_s, once_s = gauges.get((TIER_RATE, tier)), gauges.get((TIER_FIXED, tier))
        samples = int(gauges.get((SAMPLES, tier), 0))
        assumed = getattr(UNMEASURED, tier)
        tiers[tier] = (
            TransferRate(bytes_per_s, once_s, samples) if bytes_per_s and once_s is not None else assumed
        )
    curve = PrefillCurve(fixed_s, token_s, pair_s, int(gauges.get((SAMPLES, "prefill"), 0)))
    return CostModel(curve, tiers["dram"], tiers["ssd"], int(kv_bytes), UNMEASURED.chunk_tokens)
