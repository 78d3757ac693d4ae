"""Ray Serve's autoscaling by the programs that replicas serve in time (docs/fleet.md).

Seam, read and run on Ray 2.60.0: a policy function gets an AutoscalingContext; its `aggregated_metrics` has
what `record_autoscaling_stats` of each replica returned, at the mean of the last `look_back_period_s`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

LIVE, IN_TIME = "continuum_live_programs", "continuum_programs_in_time"
FULL = 0.8  # of the programs served in time: a replica takes minutes to start


def replicas_for(live: Iterable[float], in_time: Iterable[float]) -> float:
    """How many replicas would serve in time what each of these has, and be FULL."""
    return sum(n / most for n, most in zip(live, in_time, strict=True)) / FULL


def replicas(context: Any) -> tuple[float, dict[str, Any]]:
    """The policy function; Ray rounds up and applies the bounds and delays of its configuration."""
    found: Mapping[str, Mapping[object, float]] = context.aggregated_metrics or {}
    live, in_time = found.get(LIVE, {}), found.get(IN_TIME, {})
    known = [each for each in live if each in in_time]  # one without a program has reported none yet
    if not known:
        return context.target_num_replicas, {}
    return replicas_for((live[each] for each in known), (in_time[each] for each in known)), {}
