"""A replica's figures: those that vLLM and this package keep in its process, and one of a fleet's own."""

from __future__ import annotations

from prometheus_client import REGISTRY, Counter

REQUESTS = ("vllm:num_requests_waiting", "vllm:num_requests_running")
TURNS = ("continuum_fleet_turns", "Prompts by the reason for their replica", ["why"])
turns = Counter(*TURNS)


def requests() -> int:
    """Waiting and running ones of this process's one engine."""
    families = REGISTRY.restricted_registry(REQUESTS).collect()
    return int(sum(sample.value for family in families for sample in family.samples))
