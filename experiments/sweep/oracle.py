"""Oracles for the simulator: a policy that knows each tool's time, an admission that knows each context."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import mean
from typing import Any

from continuum_lmcache.admission.context_growth import ContextGrowth
from continuum_lmcache.admission.controller import AdmissionController, PendingProgram
from continuum_lmcache.config import ContinuumConfig
from continuum_lmcache.reload.cost_model import CostModel
from continuum_lmcache.retention.policies import POLICIES, Policy
from continuum_lmcache.retention.queue_order import pinned_first
from continuum_lmcache.tools.durations import ToolDurations
from continuum_lmcache.types import EngineLoad, FinishedTurn, ProgramId, Retention
from continuum_lmcache.vllm_plugin import turn_lifecycle
from experiments.sweep.cases import ORACLE
from experiments.workload import Program

SLACK_S = 0.1  # the pin must still be there when the next turn arrives


def knowing(programs: Sequence[Program]) -> Policy:
    """Eq. 2 (arXiv 2511.02230 §4) with P a step at the true gap: pin until then, or not at all.

    Same order and scheduler as `continuum`. A bound on the gain from known tool times, not on that of
    scheduling.
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

    return Policy(retain, pinned_first)


@contextmanager
def oracle_of(programs: Sequence[Program]) -> Iterator[None]:
    """Within the block, ORACLE is the name of a policy that knows these programs."""
    POLICIES[ORACLE] = knowing(programs)
    try:
        yield
    finally:
        del POLICIES[ORACLE]


class Sizes(ContextGrowth):
    """The true later contexts. `asked`: the program of the next forecast."""

    def __init__(self, programs: Mapping[str, Program]) -> None:
        super().__init__()
        self.programs = programs
        self.asked = ProgramId("")

    @property
    def final_tokens(self) -> float:
        return mean(program.turns[-1].context_tokens for program in self.programs.values())

    def forecast_tokens(self, own_tokens: int, turns: int) -> float:
        """The mean of the program's later contexts, without the shared head."""
        specs = self.programs[self.asked].turns
        now_tokens = specs[turns - 1].context_tokens if turns else specs[0].input_tokens
        later_tokens = [turn.context_tokens for turn in specs[turns:]] or [now_tokens]
        return own_tokens + max(0.0, mean(later_tokens) - now_tokens)


class TrueSizesAdmission(AdmissionController):
    """Tells its Sizes which program each forecast is of."""

    growth: Sizes

    def on_arrival(self, now_s: float, program: ProgramId, *args: Any, **kwargs: Any) -> bool:
        self.growth.asked = program
        return super().on_arrival(now_s, program, *args, **kwargs)

    def on_prefix_hit(self, program: ProgramId, *args: Any) -> None:
        self.growth.asked = program
        super().on_prefix_hit(program, *args)

    def on_pause(self, now_s: float, program: ProgramId, *args: Any, **kwargs: Any) -> None:
        self.growth.asked = program
        super().on_pause(now_s, program, *args, **kwargs)

    def _next(self) -> PendingProgram | None:
        pending = super()._next()
        if pending is not None:
            self.growth.asked = pending.program
        return pending


@contextmanager
def true_sizes_of(programs: Sequence[Program]) -> Iterator[None]:
    """Within the block, the admission of engines that are built knows these programs' contexts."""
    known = {program.program_id: program for program in programs}
    turn_lifecycle.AdmissionController = lambda *args, **kwargs: TrueSizesAdmission(
        *args, growth=Sizes(known), **kwargs
    )  # type: ignore
    try:
        yield
    finally:
        turn_lifecycle.AdmissionController = AdmissionController  # type: ignore
