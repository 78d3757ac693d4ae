"""Which programs' KV stays on the GPU, until when, and in which blocks: the one owner of pins.

A pin begins in `take` and ends in `release`, and nowhere else. No clock and no I/O. Blocks are handles for
the holder, which is vLLM's block pool in an engine.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from continuum_lmcache.errors import InvariantError
from continuum_lmcache.programs.table import Program
from continuum_lmcache.telemetry.events import PinReleased, PinRenewed, PinTaken
from continuum_lmcache.types import FinishedTurn, Pin, PinEnd, ProgramId, Retention

B = TypeVar("B")


class BlockHolder(Protocol[B]):
    """Counts references on blocks."""

    def numbers(self, blocks: list[B]) -> list[int]:
        """By which a block is told that several pins hold."""

    def hold(self, blocks: list[B]) -> None:
        """Add a reference to each; they are in use, or were freed in this call."""

    def release(self, blocks: list[B]) -> None:
        """Drop a reference of each, the last block first, so that the prefix is evicted last."""


class HeldBlocks:
    """How many pins hold each block. Pins of programs with one head share its blocks, which count once."""

    def __init__(self) -> None:
        self._pins: Counter[int] = Counter()  # by block number

    def __len__(self) -> int:
        return len(self._pins)

    def more(self, numbers: list[int]) -> int:
        """How many blocks there would be if these were held too."""
        return len(self._pins) + sum(number not in self._pins for number in numbers)

    def add(self, numbers: list[int]) -> None:
        self._pins.update(numbers)

    def remove(self, numbers: list[int]) -> None:
        pins = self._pins
        for number in numbers:
            if pins[number] == 1:
                del pins[number]
            else:
                pins[number] -= 1


@dataclass(slots=True)
class PinTable(Generic[B]):
    """One pin a program at most, within a budget of `max_pinned_blocks`. A block that pins share counts once.

    A pin stays while its program's next turn waits to run, but never beyond `max_ttl_s`.
    """

    programs: Mapping[ProgramId, Program]  # read only
    holder: BlockHolder[B]
    max_pinned_blocks: int
    max_tenant_blocks: int
    max_ttl_s: float = 300.0
    publish: Callable[[object], None] = lambda _event: None
    pinned: dict[ProgramId, Pin] = field(default_factory=dict)
    outcomes: Counter[PinEnd] = field(default_factory=Counter)
    taken: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    _blocks: dict[ProgramId, list[B]] = field(default_factory=dict)
    _on_trial: set[ProgramId] = field(default_factory=set)  # programs whose blocks are free on trial
    _held: HeldBlocks = field(default_factory=HeldBlocks)
    _by_tenant: dict[str, HeldBlocks] = field(default_factory=dict)
    _deadlines: list[tuple[float, ProgramId]] = field(default_factory=list)  # heap, stale entries skipped

    def take(self, now_s: float, turn: FinishedTurn, keep: Retention, blocks: list[B]) -> Pin | None:
        """Begin a pin on a finished turn's blocks, if `keep` has a TTL and the budget allows it.

        Release the program's older pin first: a program has one pin, the latest.
        """
        if (older := self.pinned.get(turn.program)) is not None:
            raise InvariantError(f"program {turn.program!r} already holds a pin of {older.blocks} blocks")
        if keep.ttl_s <= 0 or turn.blocks == 0:
            return None
        tenant, numbers = self.programs[turn.program].tenant, self.holder.numbers(blocks)
        if reason := self._over_budget(tenant, numbers):
            self.refused[reason] += 1
            return None
        pin = Pin(turn.program, turn.blocks, now_s, now_s + keep.ttl_s, keep, turn)
        self.pinned[turn.program] = pin
        self._blocks[turn.program] = blocks
        self._held.add(numbers)
        self._by_tenant.setdefault(tenant, HeldBlocks()).add(numbers)
        self.taken += 1
        heapq.heappush(self._deadlines, (min(pin.deadline_s, now_s + self.max_ttl_s), turn.program))
        self.holder.hold(blocks)
        self.publish(PinTaken(now_s, pin))
        return pin

    def release(self, now_s: float, program: ProgramId, why: PinEnd) -> Pin | None:
        """End the program's pin, if it has one."""
        pin = self.pinned.pop(program, None)
        if pin is None:
            return None
        tenant = self.programs[program].tenant
        blocks = self._blocks.pop(program)
        numbers = self.holder.numbers(blocks)
        self._held.remove(numbers)
        self._by_tenant[tenant].remove(numbers)
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]  # else the table would grow with each new salt
        self.outcomes[why] += 1
        if program in self._on_trial:
            self._on_trial.remove(program)
        else:
            self.holder.release(blocks)
        self.publish(PinReleased(now_s, program, why))
        return pin

    def renew(self, now_s: float, program: ProgramId, deadline_s: float) -> None:
        """Change the deadline of the program's pin."""
        pin = self.pinned[program] = replace(self.pinned[program], deadline_s=deadline_s)
        heapq.heappush(self._deadlines, (min(deadline_s, pin.taken_s + self.max_ttl_s), program))
        self.publish(PinRenewed(now_s, program, deadline_s))

    def turn_stopped_waiting(self, program: ProgramId) -> None:
        """A turn of the program ran or ended. Its pin may have stayed past its deadline for that turn."""
        if program in self.pinned and not self.programs[program].waiting:
            heapq.heappush(self._deadlines, (self._end_s(self.pinned[program]), program))

    @property
    def pinned_blocks(self) -> int:
        """How many blocks pins hold."""
        return len(self._held)

    # reclaiming ------------------------------------------------------------

    def free_on_trial(self, program: ProgramId) -> None:
        """Free the pin's blocks for one allocation: `release` the pin if that succeeds, else `end_trial`."""
        self.holder.release(self._blocks[program])
        self._on_trial.add(program)

    def end_trial(self, program: ProgramId) -> None:
        """The allocation failed: hold the pin's blocks again."""
        self._on_trial.remove(program)
        self.holder.hold(self._blocks[program])

    def blocks(self, program: ProgramId) -> list[B]:
        """The blocks of the program's pin; none without a pin."""
        return self._blocks.get(program, [])

    def victims(self, program: ProgramId | None) -> list[Pin]:
        """Pins of other programs than `program`, the latest-arrived program's first (paper §4)."""
        others = [pin for pin in self.pinned.values() if pin.program != program]
        return sorted(others, key=lambda pin: -self.programs[pin.program].arrival_s)

    # deadlines -------------------------------------------------------------

    def due(self, now_s: float) -> list[ProgramId]:
        """All programs with an expired pin; where the next turn waits, not before max_ttl_s."""
        found = []
        while (end_s := self.next_deadline_s()) is not None and end_s <= now_s:
            found.append(heapq.heappop(self._deadlines)[1])
        return list(dict.fromkeys(found))

    def next_deadline_s(self) -> float | None:
        """When the next pin expires, if no program returns before."""
        while self._deadlines:
            at_s, program = self._deadlines[0]
            pin = self.pinned.get(program)
            end_s = self._end_s(pin) if pin is not None else None
            if at_s == end_s:
                return at_s
            heapq.heappop(self._deadlines)
            if end_s is not None and self.programs[program].waiting:
                heapq.heappush(self._deadlines, (end_s, program))
        return None

    def check(self) -> None:
        """Raise InvariantError unless sums, pins and blocks agree."""
        by_tenant: dict[str, set[int]] = {}
        for program, blocks in self._blocks.items():
            by_tenant.setdefault(self.programs[program].tenant, set()).update(self.holder.numbers(blocks))
        total, ends = len(set().union(*by_tenant.values())), sum(self.outcomes.values())
        counted = {tenant: len(held) for tenant, held in self._by_tenant.items()}
        unknown = self.pinned.keys() - self.programs.keys()
        for holds, equation in (
            (self.pinned_blocks == total, f"pinned_blocks {self.pinned_blocks} != blocks of pins {total}"),
            (
                counted == {tenant: len(held) for tenant, held in by_tenant.items()},
                f"blocks by tenant {counted} != those of their pins",
            ),
            (not unknown, f"pins of programs that are not in the table: {unknown}"),
            (self._blocks.keys() == self.pinned.keys(), "pins and their blocks are of different programs"),
            (not self._on_trial, f"pins whose blocks are still free on trial: {self._on_trial}"),
            (total <= self.max_pinned_blocks, f"pinned {total} > budget {self.max_pinned_blocks}"),
            (
                self.taken - ends == len(self.pinned),
                f"taken {self.taken} - ended {ends} != live pins {len(self.pinned)}",
            ),
        ):
            if not holds:
                raise InvariantError(equation)

    def _end_s(self, pin: Pin) -> float:
        """When the pin ends: a turn that waits still needs it, up to max_ttl_s."""
        last_s = pin.taken_s + self.max_ttl_s
        return last_s if self.programs[pin.program].waiting else min(pin.deadline_s, last_s)

    def _over_budget(self, tenant: str, numbers: list[int]) -> str:
        if self._held.more(numbers) > self.max_pinned_blocks:
            return "budget"
        mine = self._by_tenant.get(tenant)
        if (mine.more(numbers) if mine else len(numbers)) > self.max_tenant_blocks:
            return "tenant"
        return ""
