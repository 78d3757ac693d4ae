"""A replica's figures: those that vLLM and this package keep in its process, and one of a fleet's own."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import REGISTRY, Counter

REQUESTS = ("vllm:num_requests_waiting", "vllm:num_requests_running")
TURNS = ("continuum_fleet_turns", "Prompts by the reason for their replica", ["why"])
turns = Counter(*TURNS)


def requests() -> int:
    """Waiting and running ones of this process's one engine."""
    return int(sum(values(REQUESTS).values()))


def values(names: Iterable[str]) -> dict[str, float]:
    """The gauges that this process's engine has reported, by name."""
    found: dict[str, float] = {}
    for family in REGISTRY.restricted_registry(names).collect():
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found
