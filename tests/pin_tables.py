"""The tables of programs and pins without an engine, driven as TurnLifecycle drives them."""

from __future__ import annotations

from continuum_lmcache.programs.table import Program, ProgramReturn, ProgramTable
from continuum_lmcache.retention.pin_table import PinTable
from continuum_lmcache.types import FinishedTurn, Pin, PinEnd, ProgramId, Retention, TurnId


class Blocks:
    """Block handles with their own reference counts."""

    def __init__(self) -> None:
        self.held = 0

    def hold(self, blocks: list[int]) -> None:
        self.held += len(blocks)

    def release(self, blocks: list[int]) -> None:
        self.held -= len(blocks)


class Tables:
    """One ProgramTable and one PinTable."""

    def __init__(
        self,
        max_pinned_blocks: int,
        max_tenant_blocks: int,
        max_programs: int = 100_000,
        max_ttl_s: float = 300.0,
    ) -> None:
        self.programs, self.blocks = ProgramTable(max_programs), Blocks()
        self.pins: PinTable[int] = PinTable(
            self.programs.records, self.blocks, max_pinned_blocks, max_tenant_blocks, max_ttl_s
        )

    def arrived(
        self, now_s: float, turn: TurnId, program: ProgramId, tenant: str = ""
    ) -> ProgramReturn | None:
        return self.programs.add_turn(now_s, turn, program, tenant)

    def started(self, turn: TurnId, program: ProgramId) -> None:
        self.programs.start_turn(turn, program)
        self.pins.turn_stopped_waiting(program)

    def finished(self, now_s: float, turn_id: TurnId, turn: FinishedTurn, keep: Retention) -> Pin | None:
        self.programs.finish_turn(now_s, turn_id, turn)
        return self.pins.take(now_s, turn, keep, [0] * turn.blocks)

    def left(self, now_s: float, turn: TurnId, program: ProgramId) -> None:
        self.programs.remove_turn(now_s, turn, program)
        self.pins.turn_stopped_waiting(program)

    def release(self, program: ProgramId, why: PinEnd) -> Pin | None:
        return self.pins.release(0.0, program, why)

    def ended(self, program: ProgramId) -> Program | None:
        return self.programs.drop(program)

    def idle(self, now_s: float, idle_s: float) -> list[ProgramId]:
        return self.programs.idle_programs(now_s, idle_s, self.pins.pinned)

    def check(self) -> None:
        self.programs.check()
        self.pins.check()
        assert self.blocks.held == self.pins.pinned_blocks
