"""The tables of programs and pins without an engine, driven as TurnLifecycle drives them."""

from __future__ import annotations

from collections import Counter

from continuum_lmcache.programs.table import Program, ProgramReturn, ProgramTable
from continuum_lmcache.retention.pin_table import PinTable
from continuum_lmcache.types import FinishedTurn, Pin, PinEnd, ProgramId, Retention, TurnId


class Blocks:
    """Block handles with their own reference counts."""

    def __init__(self) -> None:
        self.held: Counter[int] = Counter()

    def numbers(self, blocks: list[int]) -> list[int]:
        return blocks

    def hold(self, blocks: list[int]) -> None:
        self.held.update(blocks)

    def release(self, blocks: list[int]) -> None:
        self.held.subtract(blocks)


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
        self._next_block = 1000
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

    def finished(
        self, now_s: float, turn_id: TurnId, turn: FinishedTurn, keep: Retention, shared_blocks: int = 0
    ) -> Pin | None:
        """`shared_blocks`: the first blocks of all programs that have some."""
        self.programs.finish_turn(now_s, turn_id, turn)
        shared = min(shared_blocks, turn.blocks)
        own = range(self._next_block, self._next_block + turn.blocks - shared)
        self._next_block = own.stop
        return self.pins.take(now_s, turn, keep, [*range(shared), *own])

    def left(self, now_s: float, turn: TurnId, program: ProgramId) -> None:
        self.programs.remove_turn(now_s, turn, program)
        self.pins.turn_stopped_waiting(program)

    def release(self, program: ProgramId, why: PinEnd) -> Pin | None:
        return self.pins.release(0.0, program, why)

    def ended(self, program: ProgramId) -> Program:
        return self.programs.drop(program)

    def idle(self, now_s: float, idle_s: float) -> list[ProgramId]:
        return self.programs.idle_programs(now_s, idle_s, self.pins.pinned)

    def check(self) -> None:
        self.programs.check()
        self.pins.check()
        assert sum(n > 0 for n in self.blocks.held.values()) == self.pins.pinned_blocks
