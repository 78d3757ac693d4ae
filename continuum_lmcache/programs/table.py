"""Who is in a tool call, who waits, and whose KV is pinned until when: the one owner of that state.

No clock and no I/O: every event brings its time, every answer is a value. The caller moves the
blocks. Blocks here are counts; which blocks they are is the caller's business.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from dataclasses import dataclass, field, replace

from continuum_lmcache.errors import InvariantError
from continuum_lmcache.types import (
    FinishedTurn,
    Pin,
    PinEnd,
    ProgramId,
    QueueEntry,
    Retention,
    ToolKey,
    TurnId,
)


@dataclass(slots=True)
class Program:
    """An agent's run: turns of inference with tool calls between them."""

    id: ProgramId
    tenant: str
    arrival_s: float
    seen_s: float
    turns: int = 0  # finished
    attained_tokens: int = 0
    context_tokens: int = 0  # of the last finished turn
    live: set[TurnId] = field(default_factory=set)
    waiting: set[TurnId] = field(default_factory=set)  # of these, those that have not run yet
    pin: Pin | None = None
    tool: ToolKey = ()  # what the last finished turn called
    finished_s: float | None = None  # when that was, while nothing has come back


@dataclass(frozen=True, slots=True)
class ProgramReturn:
    """A program is back from its tool: what the gap teaches."""

    tool: ToolKey
    gap_s: float


@dataclass(slots=True)
class ProgramTable:
    """Programs, their live turns and their pins, within a budget of `max_pinned_blocks`."""

    max_pinned_blocks: int
    max_tenant_blocks: int
    max_programs: int = 100_000
    max_ttl_s: float = 300.0
    programs: OrderedDict[ProgramId, Program] = field(default_factory=OrderedDict)  # idle longest first
    pinned: dict[ProgramId, Pin] = field(default_factory=dict)
    pinned_blocks: int = 0
    outcomes: Counter[PinEnd] = field(default_factory=Counter)
    taken: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    _by_tenant: Counter[str] = field(default_factory=Counter)
    _deadlines: list[tuple[float, ProgramId]] = field(default_factory=list)  # heap, stale entries skipped

    def arrived(
        self,
        now_s: float,
        turn: TurnId,
        program: ProgramId,
        tenant: str = "",
        since_s: float | None = None,
    ) -> ProgramReturn | None:
        """A turn of `program` joins the queue. Says what its tool gap was, if it was in one.

        `since_s`: when a program that is new here really arrived, if that was earlier.
        """
        entry = self.programs.get(program)
        if entry is None:
            arrival_s = now_s if since_s is None else since_s
            entry = self.programs[program] = Program(program, tenant, arrival_s, now_s)
        back = None
        if entry.finished_s is not None and not entry.live:
            back = ProgramReturn(entry.tool, now_s - entry.finished_s)
            entry.finished_s = None
        entry.live.add(turn)
        entry.waiting.add(turn)
        self._seen(now_s, entry)
        return back

    def started(self, turn: TurnId, program: ProgramId) -> None:
        """A turn runs: the program's pin no longer stays for its sake."""
        self._waits_no_more(turn, self.programs[program])

    def finished(self, now_s: float, turn_id: TurnId, turn: FinishedTurn, keep: Retention) -> Pin | None:
        """A turn ended in a tool call. Returns the pin to hold, if `keep` asks and the budget allows.

        Release the program's older pin first: there is one a program, the latest.
        """
        entry = self.programs[turn.program]
        if entry.pin is not None:
            raise InvariantError(f"program {turn.program!r} already holds a pin of {entry.pin.blocks} blocks")
        self.left(now_s, turn_id, turn.program)
        entry.turns += 1
        entry.tool, entry.finished_s = turn.tool, now_s
        entry.context_tokens = turn.context_tokens
        if keep.ttl_s <= 0 or turn.blocks == 0:
            return None
        if reason := self._over_budget(entry.tenant, turn.blocks):
            self.refused[reason] += 1
            return None
        pin = Pin(turn.program, turn.blocks, now_s, now_s + keep.ttl_s, keep, turn)
        entry.pin = self.pinned[turn.program] = pin
        self.pinned_blocks += pin.blocks
        self._by_tenant[entry.tenant] += pin.blocks
        self.taken += 1
        heapq.heappush(self._deadlines, (min(pin.deadline_s, now_s + self.max_ttl_s), turn.program))
        return pin

    def renew(self, program: ProgramId, deadline_s: float) -> None:
        """The program's pin ends at another time."""
        entry = self.programs[program]
        assert entry.pin is not None
        entry.pin = self.pinned[program] = replace(entry.pin, deadline_s=deadline_s)
        heapq.heappush(self._deadlines, (min(deadline_s, entry.pin.taken_s + self.max_ttl_s), program))

    def left(self, now_s: float, turn: TurnId, program: ProgramId) -> None:
        """A turn is gone, for whatever reason; the program may go on."""
        entry = self.programs.get(program)
        if entry is None:
            return
        entry.live.discard(turn)
        self._waits_no_more(turn, entry)
        self._seen(now_s, entry)

    def release(self, program: ProgramId, outcome: PinEnd) -> Pin | None:
        """Give up the program's pin, if it has one."""
        pin = self.pinned.pop(program, None)
        if pin is None:
            return None
        entry = self.programs[program]
        entry.pin = None
        self.pinned_blocks -= pin.blocks
        self._by_tenant[entry.tenant] -= pin.blocks
        if not self._by_tenant[entry.tenant]:
            del self._by_tenant[entry.tenant]  # salts come and go without end
        self.outcomes[outcome] += 1
        return pin

    def ended(self, program: ProgramId) -> Program | None:
        """The program is over: forget it, unless another of its turns is still live."""
        entry = self.programs.get(program)
        if entry is None or entry.live:
            return None
        if entry.pin is not None:
            raise InvariantError(f"program {program!r} ended with a pin of {entry.pin.blocks} blocks")
        return self.programs.pop(program)

    def due(self, now_s: float) -> list[ProgramId]:
        """Programs whose pin has run out, every one; where the next turn waits, not before max_ttl_s."""
        found = []
        while (end_s := self.next_deadline_s()) is not None and end_s <= now_s:
            found.append(heapq.heappop(self._deadlines)[1])
        return list(dict.fromkeys(found))

    def next_deadline_s(self) -> float | None:
        """When the next pin runs out, if nothing comes back before."""
        while self._deadlines:
            at_s, program = self._deadlines[0]
            end_s = self._end_s(program)
            if at_s == end_s:
                return at_s
            heapq.heappop(self._deadlines)
            if end_s is not None and self.programs[program].waiting:
                heapq.heappush(self._deadlines, (end_s, program))
        return None

    def victims(self, program: ProgramId | None) -> list[Pin]:
        """Pins of other programs than `program`, the latest-arrived program's first (paper §4)."""
        others = [p for p in self.pinned.values() if p.program != program]
        return sorted(others, key=lambda p: -self.programs[p.program].arrival_s)

    def standing(
        self, program: ProgramId | None, turn_arrival_s: float, priority: int, preempted: bool
    ) -> QueueEntry:
        """What the waiting queue's order may depend on, for one turn."""
        entry = self.programs.get(program) if program is not None else None
        return QueueEntry(
            preempted=preempted,
            pinned=entry is not None and entry.pin is not None,
            priority=priority,
            program_arrival_s=entry.arrival_s if entry else turn_arrival_s,
            turn_arrival_s=turn_arrival_s,
            attained_tokens=entry.attained_tokens if entry else 0,
        )

    def forgettable(self, now_s: float, idle_s: float) -> list[ProgramId]:
        """Programs without a live turn or a pin: not heard of for `idle_s`, or beyond max_programs."""
        surplus = len(self.programs) - self.max_programs
        found: list[ProgramId] = []
        for program, entry in self.programs.items():
            if now_s - entry.seen_s < idle_s and len(found) >= surplus:
                break
            if not entry.live and entry.pin is None:
                found.append(program)
        return found

    def check(self) -> None:
        """Raise InvariantError unless the books balance."""
        total = sum(p.blocks for p in self.pinned.values())
        held = {p.id for p in self.programs.values() if p.pin is not None}
        tenants = sum(self._by_tenant.values())
        ends = sum(self.outcomes.values())
        for holds, equation in (
            (self.pinned_blocks == total, f"pinned_blocks {self.pinned_blocks} != sum of pins {total}"),
            (tenants == total, f"blocks by tenant {tenants} != sum of pins {total}"),
            (held == set(self.pinned), f"programs with a pin {held} != pinned {set(self.pinned)}"),
            (total <= self.max_pinned_blocks, f"pinned {total} > budget {self.max_pinned_blocks}"),
            (
                self.taken - ends == len(self.pinned),
                f"taken {self.taken} - ended {ends} != live pins {len(self.pinned)}",
            ),
        ):
            if not holds:
                raise InvariantError(equation)

    def _end_s(self, program: ProgramId) -> float | None:
        """When the program's pin ends, if it has one: a turn that waits still needs it, up to max_ttl_s."""
        pin = self.pinned.get(program)
        if pin is None:
            return None
        last_s = pin.taken_s + self.max_ttl_s
        return last_s if self.programs[program].waiting else min(pin.deadline_s, last_s)

    def _waits_no_more(self, turn: TurnId, entry: Program) -> None:
        entry.waiting.discard(turn)
        if not entry.waiting and (end_s := self._end_s(entry.id)) is not None:
            heapq.heappush(self._deadlines, (end_s, entry.id))  # it may have outstayed while the turn waited

    def _over_budget(self, tenant: str, blocks: int) -> str:
        if self.pinned_blocks + blocks > self.max_pinned_blocks:
            return "budget"
        if self._by_tenant[tenant] + blocks > self.max_tenant_blocks:
            return "tenant"
        return ""

    def _seen(self, now_s: float, entry: Program) -> None:
        entry.seen_s = now_s
        self.programs.move_to_end(entry.id)
