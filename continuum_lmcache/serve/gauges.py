"""A replica's figures: those that vLLM and this package keep in its process, and two of a fleet's own."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import REGISTRY, Counter, Gauge

from continuum_lmcache.reload.cost_model import PrefillCurve

REQUESTS = ("vllm:num_requests_waiting", "vllm:num_requests_running")
CURVE = (
    "continuum_prefill_fixed_seconds",
    "continuum_prefill_seconds_per_token",
    "continuum_prefill_seconds_per_token_pair",
)
TURNS = ("continuum_fleet_turns", "Prompts by the reason for their replica", ["why"])
WAIT = ("continuum_fleet_wait_seconds", "What a later turn would wait before its prompt is computed", ())
turns, wait = Counter(*TURNS), Gauge(*WAIT)


def read_gauges() -> dict[str, float]:
    """The gauges of this process, which has one engine; a missing gauge has no entry."""
    families = REGISTRY.restricted_registry((*REQUESTS, *CURVE)).collect()
    return {sample.name: sample.value for family in families for sample in family.samples}


def requests(gauges: Mapping[str, float]) -> int:
    """Waiting and running ones."""
    return int(sum(gauges.get(name, 0.0) for name in REQUESTS))


def prefill(gauges: Mapping[str, float]) -> PrefillCurve | None:
    """The speed that the engine has measured or assumed; None: it is a stock one, or has not reported yet."""
    if not gauges.keys() >= set(CURVE):
        return None
    fixed_s, per_token_s, per_pair_s = (gauges[name] for name in CURVE)
    return PrefillCurve(fixed_s, per_token_s, per_pair_s, samples=0)
