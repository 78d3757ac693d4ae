"""A replica's figures, and Ray Serve's autoscaling by the programs served in time (docs/fleet.md).

Seam, read and run on Ray 2.60.0: a policy function gets an AutoscalingContext; its `aggregated_metrics` has
what `record_autoscaling_stats` of each replica returned, at the mean of the last `look_back_period_s`.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import REGISTRY, Counter

from continuum_lmcache.admission.served import engines_for

LIVE, IN_TIME = "continuum_live_programs", "continuum_programs_in_time"
FULL = 0.6  # of the programs served in time: a replica takes minutes to start, and load comes unevenly
TURNS = ("continuum_fleet_turns", "Prompts by the reason for their replica", ["why"])
turns = Counter(*TURNS)


def gauges(*names: str) -> dict[str, float]:
    """Those that vLLM and this package have reported in this process, by name."""
    found: dict[str, float] = {}
    for family in REGISTRY.restricted_registry(names).collect():
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def replicas(context: Any) -> tuple[float, dict[str, Any]]:
    """The policy function; Ray rounds up and applies the bounds and delays of its configuration."""
    found = context.aggregated_metrics or {}
    full = engines_for(found.get(LIVE, {}), found.get(IN_TIME, {}))
    return context.target_num_replicas if full is None else full / FULL, {}
