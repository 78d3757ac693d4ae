"""The tables of programs and pins without an engine, driven as the engine drives them."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

from continuum_lmcache.programs.program import Program
from continuum_lmcache.programs.shared_prefixes import NO_HEAD
from continuum_lmcache.programs.table import ProgramTable
from continuum_lmcache.retention.pin_table import PinTable
from continuum_lmcache.types import FinishedTurn, Pin, PinEnd, Place, ProgramId, Retention, TurnId


class Tables:
    """One ProgramTable and one PinTable, with the references that pins hold."""

    def __init__(self, max_pinned_blocks: int, max_tenant_blocks: int, max_programs: int = 100_000) -> None:
        self.programs = ProgramTable(max_programs)
        self.references: Counter[int] = Counter()
        self._next_block = 1000
        self.pins = PinTable(self.programs.records, max_pinned_blocks, max_tenant_blocks)

    def arrived(self, now_s: float, turn: TurnId, program: ProgramId, tenant: str = "") -> float | None:
        """Returns the tool gap in seconds."""
        record = self.programs.add(now_s, program, tenant, now_s, one_turn=False)
        gap_s = self.programs.add_turn(now_s, turn, record)
        self.programs.queue_turn(record, 10, NO_HEAD)
        return gap_s

    def started(self, program: ProgramId) -> None:
        self.programs.records[program].is_waiting = False
        self.pins.turn_stopped_waiting(program)

    def finished(
        self, now_s: float, turn: FinishedTurn, keep: Retention, shared_blocks: int = 0
    ) -> Pin | None:
        """`shared_blocks`: the first blocks of all programs that have some."""
        program, prompt = self.programs.records[turn.program], SimpleNamespace(block_hashes=())
        self.programs.finish_turn(now_s, program, turn, prompt, Place(True, "test", 1e9))
        shared = min(shared_blocks, turn.blocks)
        own = range(self._next_block, self._next_block + turn.blocks - shared)
        self._next_block = own.stop
        pin = self.pins.take(now_s, turn, keep, [*range(shared), *own])
        self.references.update(pin.block_ids if pin is not None else ())
        return pin

    def left(self, now_s: float, program: ProgramId) -> None:
        self.programs.remove_turn(now_s, self.programs.records[program])
        self.pins.turn_stopped_waiting(program)

    def release(self, program: ProgramId, why: PinEnd) -> Pin | None:
        pin = self.pins.release(program, why)
        self.references.subtract(pin.block_ids if pin is not None else ())
        return pin

    def ended(self, program: Program) -> None:
        self.programs.drop(program)

    def idle(self, now_s: float, idle_s: float) -> list[Program]:
        return self.programs.idle_programs(now_s, idle_s, self.pins.pinned)

    def check(self) -> None:
        self.programs.check()
        self.pins.check()
        assert sum(n > 0 for n in self.references.values()) == self.pins.pinned_blocks
