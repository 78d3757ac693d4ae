"""The paper's policy (Continuum, arXiv 2511.02230 §4), served as it is written there: pins and order.

It knows no price of a pin, no line and no slices: nothing bounds a wait. What is loaded from a tier is
decided as in `continuum`: the paper does not say it, and a slow disk would be charged to it.
"""

from __future__ import annotations

from continuum_lmcache.policy import continuum
from continuum_lmcache.policy.interface import EngineState, Order, Policy
from continuum_lmcache.policy.ttl_solver import best_ttl, retention_of
from continuum_lmcache.types import FinishedTurn, QueueEntry, Retention


def retain(turn: FinishedTurn, state: EngineState) -> Retention:
    """Eq. 2: tau* = argmax P(tau, f) * (T * eta + PrefillReload) - tau. While the tool is cold, eta is 1."""
    seen = state.gaps.distribution(turn.tool)
    is_cold = seen.level == "cold"
    benefit_s = state.queue_delay_s * (1.0 if is_cold else state.eta) + state.reload_s
    ttl_s = best_ttl(seen, benefit_s, state.config.max_ttl_s)
    return retention_of(seen, ttl_s, benefit_s, "cold-start" if is_cold else "cdf")


def order(entry: QueueEntry) -> Order:
    """Preempted turns, those with a pin, then by the program's arrival. The client's priority comes first
    where vLLM's user has it honoured; else it is 0 for all."""
    return (
        entry.priority,
        not entry.preempted,
        not entry.pinned,
        entry.program_arrival_s,
        entry.turn_arrival_s,
    )


published = Policy(retain, order, to_load=continuum.to_load)
