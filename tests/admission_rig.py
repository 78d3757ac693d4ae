"""Admission and the program table, driven as the engine drives them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from continuum_lmcache.admission.controller import AdmissionController, KVCapacity
from continuum_lmcache.config import ContinuumConfig
from continuum_lmcache.policy.interface import EngineState
from continuum_lmcache.policy.named import POLICIES
from continuum_lmcache.programs.context_growth import ContextGrowth
from continuum_lmcache.programs.program import Program, Stage
from continuum_lmcache.programs.table import ProgramTable
from continuum_lmcache.reload.cost_model import UNMEASURED
from continuum_lmcache.tools.distribution import DurationDistribution
from continuum_lmcache.tools.durations import ToolDurations
from continuum_lmcache.types import FinishedTurn, ProgramId, Residency, ToolKey, TurnId


def a_state(config: ContinuumConfig | None = None, **known: Any) -> EngineState:
    """Of an engine that has 60 of 100 blocks free and knows nothing else."""
    values: dict[str, Any] = {
        "config": config or ContinuumConfig(),
        "costs": UNMEASURED,
        "gaps": ToolDurations(),
        "lost_share": 0.0,
        "expected_s": 20.0,
        "reload_s": 0.0,
        "queue_delay_s": 0.0,
        "eta": 1.0,
        "is_memory_short": False,
        "total_blocks": 100,
        "free_blocks": 60,
        "pinned_blocks": 10,
    }
    return EngineState(**values | known)


@dataclass
class OneGap(ToolDurations):
    """As if each tool's mean gap were known, and nothing else."""

    gap_s: float = 0.0

    def most_specific(self, tool: ToolKey) -> DurationDistribution:  # noqa: ARG002
        return DurationDistribution("own", (self.gap_s,), (1.0,), 1)


class AdmissionRig:
    """Programs by name."""

    def __init__(
        self, capacity: KVCapacity, longest_wait_s: float, growth: ContextGrowth | None = None
    ) -> None:
        self.programs = ProgramTable(100_000, growth or ContextGrowth())
        config = ContinuumConfig(longest_wait_s=longest_wait_s, first_token_limit_s=0.0)
        self.admission = AdmissionController(self.programs, capacity, config, POLICIES["continuum"])

    def stage(self, name: ProgramId) -> Stage:
        return self.programs.records[name].stage

    def on_arrival(
        self,
        now_s: float,
        name: ProgramId,
        prompt_tokens: int,
        priority: int = 0,
        turns: int = 0,
        exempt: bool = False,
        hashes: Sequence[Hashable] = (),
        tenant: str = "",
    ) -> bool:
        """Whether the turn may run at once. `turns`: of a program that ran elsewhere."""
        program = self._arrived(now_s, name, one_turn=False, tenant=tenant)
        program.turns = max(program.turns, turns)
        prompt = SimpleNamespace(num_prompt_tokens=prompt_tokens, block_hashes=hashes)
        self.admission.on_arrival(now_s, program, prompt, priority, exempt or turns > 0)
        return program.stage is Stage.ACTIVE

    def add_request(self, name: ProgramId, prompt_tokens: int, now_s: float = 0.0, runs: bool = True) -> None:
        """A request without a program. It runs, or is in vLLM's queue."""
        program = self._arrived(now_s, name, one_turn=True)
        prompt = SimpleNamespace(num_prompt_tokens=prompt_tokens, block_hashes=())
        self.admission.on_arrival(now_s, program, prompt, exempt=True)
        if runs:
            self.programs.running_singles[name] = program

    def _arrived(self, now_s: float, name: ProgramId, one_turn: bool, tenant: str = "") -> Program:
        program = self.programs.add(now_s, name, tenant, now_s, one_turn)
        self.programs.expect_again(program)
        self.programs.add_turn(now_s, TurnId(name), program)
        return program

    def on_prefix_hit(self, name: ProgramId, hashes: Sequence[Hashable], tokens: int) -> None:
        self.admission.on_prefix_hit(self.programs.records[name], hashes, tokens)

    def admit(self, now_s: float, idle: bool, prompt_share: float = 1.0) -> list[ProgramId]:
        self.programs.expire_away(now_s)
        asked = self.admission.admit(now_s, idle, prompt_share)
        return [program.id for program, start in asked if start.may]

    def on_pause(
        self,
        now_s: float,
        name: ProgramId,
        tokens: int,
        expected_s: float,
        reload_s: float = 0.0,
        gap_s: float = 0.0,
        late_share: float = 0.0,
    ) -> None:
        """The turn ends in a tool call."""
        program, programs = self.programs.records[name], self.programs
        self.admission.on_turn_end(now_s)
        waiting = [p.line_since_s for p in programs.records.values() if p.stage is Stage.IN_LINE]
        ended = FinishedTurn(
            *(name, 1, ("bash",), tokens, 1, Residency(0, 0, 0, tokens)),
            place_turns=program.turns + 1 - program.turns_before_place,
            place_s=now_s - program.placed_s,
            line_reload_s=reload_s,
        )
        state = a_state(self.admission.config, expected_s=expected_s, gaps=OneGap(gap_s=gap_s))
        turns = SimpleNamespace(
            waiting=len(waiting),
            longest_wait_s=lambda now_s: now_s - min(waiting, default=now_s),
            late_share=lambda _: late_share,
        )
        place = self.admission.place_of(now_s, ended, state, turns)
        programs.finish_turn(now_s, program, ended, SimpleNamespace(block_hashes=()), place)

    def remove_program(self, name: ProgramId, finished_turns: int = 0) -> None:
        """The program ends after `finished_turns`, or its turn is aborted (0)."""
        program = self.programs.records.get(name)
        if program is None:
            return
        if not finished_turns:
            self.programs.expect_again(program)
            self.programs.remove_turn(0.0, program)
            if program.is_one_turn:
                self.programs.drop(program)
        else:
            program.turns = finished_turns
            self.programs.count_end(program)
            self.programs.drop(program)

    def expire_absent(self, now_s: float) -> list[ProgramId]:
        return [program.id for program in self.programs.expire_away(now_s)]
