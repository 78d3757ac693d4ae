"""Which programs' KV stays on the GPU, until when, and in which blocks: the one owner of pins.

A pin begins in `take` and ends in `release`, and nowhere else. Who calls them holds and frees its blocks.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from continuum_lmcache.errors import InvariantError
from continuum_lmcache.programs.program import Program
from continuum_lmcache.types import FinishedTurn, Pin, PinEnd, ProgramId, Retention


class PinnedBlocks:
    """The blocks that pins hold. Pins of programs with one head share its blocks, which count once.

    Sets, since no loop over a whole context is Python's then.
    """

    def __init__(self) -> None:
        self._held: set[int] = set()  # block ids
        self._shared: dict[int, int] = {}  # of these, by how many pins; if by more than one

    def __len__(self) -> int:
        return len(self._held)

    def fits_with(self, block_ids: Sequence[int], most_blocks: int) -> bool:
        """Whether there would be at most so many blocks if these were pinned too."""
        free = most_blocks - len(self._held)
        return len(block_ids) <= free or len(set(block_ids) - self._held) <= free

    def add(self, block_ids: Sequence[int]) -> None:
        shared, held = self._shared, self._held
        for block_id in () if held.isdisjoint(block_ids) else held.intersection(block_ids):
            shared[block_id] = shared.get(block_id, 1) + 1
        held.update(block_ids)

    def remove(self, block_ids: Sequence[int]) -> None:
        shared, held = self._shared, self._held
        others = shared.keys() & block_ids if shared else ()
        held.difference_update(block_ids)
        held.update(others)
        for block_id in others:
            shared[block_id] -= 1
            if shared[block_id] == 1:
                del shared[block_id]


@dataclass(slots=True)
class PinTable:
    """One pin a program at most, within a budget of `max_pinned_blocks`. A block that pins share counts once.

    A pin stays while its program's next turn waits to run, but never beyond `max_ttl_s`.
    """

    programs: Mapping[ProgramId, Program]  # read only
    max_pinned_blocks: int
    max_tenant_blocks: int
    max_ttl_s: float = 300.0
    pinned: dict[ProgramId, Pin] = field(default_factory=dict)
    outcomes: Counter[PinEnd] = field(default_factory=Counter)
    taken: int = 0
    refused: Counter[str] = field(default_factory=lambda: Counter(budget=0, tenant=0))
    _blocks: PinnedBlocks = field(default_factory=PinnedBlocks)
    _by_tenant: dict[str, PinnedBlocks] = field(default_factory=dict)
    _deadlines: list[tuple[float, ProgramId]] = field(default_factory=list)  # heap, stale entries skipped

    def take(self, now_s: float, turn: FinishedTurn, keep: Retention, block_ids: Sequence[int]) -> Pin | None:
        """Begin a pin on a finished turn's blocks, if `keep` has a TTL and the budget allows it."""
        if (older := self.pinned.get(turn.program)) is not None:
            raise InvariantError(f"program {turn.program!r} already holds a pin of {older.blocks} blocks")
        if keep.ttl_s <= 0 or not block_ids:
            return None
        tenant = self.programs[turn.program].tenant
        if reason := self._over_budget(tenant, block_ids):
            self.refused[reason] += 1
            return None
        pin = Pin(turn.program, block_ids, now_s, now_s + keep.ttl_s, keep, turn)
        self.pinned[turn.program] = pin
        self._blocks.add(block_ids)
        if self._counts_tenants:
            self._by_tenant.setdefault(tenant, PinnedBlocks()).add(block_ids)
        self.taken += 1
        heapq.heappush(self._deadlines, (min(pin.deadline_s, now_s + self.max_ttl_s), turn.program))
        return pin

    def release(self, program: ProgramId, why: PinEnd) -> Pin | None:
        pin = self.pinned.pop(program, None)
        if pin is None:
            return None
        self._blocks.remove(pin.block_ids)
        if self._counts_tenants:
            tenant = self.programs[program].tenant
            self._by_tenant[tenant].remove(pin.block_ids)
            if not self._by_tenant[tenant]:
                del self._by_tenant[tenant]  # else the table would grow with each new salt
        self.outcomes[why] += 1
        return pin

    def renew(self, program: ProgramId, deadline_s: float) -> Pin:
        """Change the deadline of the program's pin. Returns the pin with it."""
        pin = self.pinned[program] = replace(self.pinned[program], deadline_s=deadline_s)
        heapq.heappush(self._deadlines, (min(deadline_s, pin.taken_s + self.max_ttl_s), program))
        return pin

    def turn_stopped_waiting(self, program: ProgramId) -> None:
        """A turn of the program ran or ended. Its pin may have stayed past its deadline for that turn."""
        if program in self.pinned and not self.programs[program].is_waiting:
            heapq.heappush(self._deadlines, (self._end_s(self.pinned[program]), program))

    @property
    def pinned_blocks(self) -> int:
        return len(self._blocks)

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
            if end_s is not None and self.programs[program].is_waiting:
                heapq.heappush(self._deadlines, (end_s, program))
        return None

    def check(self) -> None:
        """Raise InvariantError unless sums and pins agree."""
        held: dict[str, set[int]] = {}
        for pin in self.pinned.values():
            held.setdefault(self.programs[pin.program].tenant, set()).update(pin.block_ids)
        by_tenant = {t: len(blocks) for t, blocks in held.items()} if self._counts_tenants else {}
        counted = {tenant: len(blocks) for tenant, blocks in self._by_tenant.items()}
        total, ends = len(set().union(*held.values())), sum(self.outcomes.values())
        for name, noted, found in (
            ("pinned blocks", self.pinned_blocks, total),
            ("blocks by tenant", counted, by_tenant),
            ("pins taken", self.taken, ends + len(self.pinned)),
        ):
            if noted != found:
                raise InvariantError(f"{name}({noted}) != those of the pins({found})")
        if total > self.max_pinned_blocks:
            raise InvariantError(f"pinned({total}) > budget({self.max_pinned_blocks})")

    def _end_s(self, pin: Pin) -> float:
        """When the pin ends: a turn that waits still needs it, up to max_ttl_s."""
        last_s = pin.taken_s + self.max_ttl_s
        return last_s if self.programs[pin.program].is_waiting else min(pin.deadline_s, last_s)

    @property
    def _counts_tenants(self) -> bool:
        """Else a tenant may hold what all may hold, and its own count decides nothing."""
        return self.max_tenant_blocks < self.max_pinned_blocks

    def _over_budget(self, tenant: str, block_ids: Sequence[int]) -> str:
        if not self._blocks.fits_with(block_ids, self.max_pinned_blocks):
            return "budget"
        mine = self._by_tenant.get(tenant, PinnedBlocks())
        return "" if mine.fits_with(block_ids, self.max_tenant_blocks) else "tenant"
