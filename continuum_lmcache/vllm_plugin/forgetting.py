"""Programs whose clients never said that they were done."""

from __future__ import annotations

from dataclasses import dataclass

from continuum_lmcache.types import ProgramId
from continuum_lmcache.vllm_plugin.keeper import Keeper

EVERY_S = 10.0


@dataclass(slots=True)
class Forgetting:
    """Drops those not heard of for `program_idle_s`, looking every EVERY_S."""

    keeper: Keeper
    at_s: float = 0.0

    def look(self, now_s: float) -> None:
        """Drop them, if it is time to look."""
        if now_s < self.at_s:
            return
        self.at_s = now_s + EVERY_S
        idle_s = self.keeper.config.program_idle_s
        for program in self.keeper.ledger.forgettable(now_s, idle_s):
            self._drop(now_s, program)

    def _drop(self, now_s: float, program: ProgramId) -> None:
        """What its last tool took, at least, is still worth knowing."""
        keeper = self.keeper
        entry = keeper.ledger.ended(program)
        keeper.witness.returns.over(program)
        keeper.matching.over(program)
        if entry is not None:
            if entry.finished_s is not None:
                keeper.appraiser.never_came(entry.tool, now_s - entry.finished_s)
            keeper.appraiser.program_over(entry.turns)
            keeper.crowd.door.leaves(now_s, program, entry.turns)
            keeper.recorder.ended(now_s, program)
