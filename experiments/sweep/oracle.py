"""A policy that only a simulator can have: it knows how long every tool will take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from continuum_lmcache.config import ContinuumConfig
from continuum_lmcache.reload.cost_model import CostModel
from continuum_lmcache.retention.policies import POLICIES, Policy
from continuum_lmcache.retention.queue_order import by_pin
from continuum_lmcache.tools.durations import ToolDurations
from continuum_lmcache.types import EngineLoad, FinishedTurn, Retention
from experiments.sweep.cases import ORACLE
from experiments.workload import Program

SLACK_S = 0.1  # the pin must still be there when the next turn arrives


def knowing(programs: Sequence[Program]) -> Policy:
    """Eq. 2 (arXiv 2511.02230 §4) with P a step at the true gap: pin until then, or not at all.

    Same order and scheduler as `continuum`. A bound on what knowing tool times is worth, not on what
    scheduling can do.
    """
    gaps_s = {(p.program_id, i): turn.gap_s for p in programs for i, turn in enumerate(p.turns, 1)}

    def retain(
        turn: FinishedTurn, _gaps: ToolDurations, _costs: CostModel, load: EngineLoad, config: ContinuumConfig
    ) -> Retention:
        gap_s = gaps_s[str(turn.program), turn.number]
        benefit_s = load.queue_delay_s * load.eta + load.reload_s
        pays = gap_s is not None and benefit_s > gap_s
        ttl_s = gap_s + SLACK_S if pays and gap_s is not None else 0.0
        return Retention(ttl_s, config.policy, "oracle", 1.0, benefit_s, ttl_s)

    return Policy(retain, by_pin)


@contextmanager
def oracle_of(programs: Sequence[Program]) -> Iterator[None]:
    """Within the block, ORACLE is a policy's name, and knows these programs."""
    POLICIES[ORACLE] = knowing(programs)
    try:
        yield
    finally:
        del POLICIES[ORACLE]
