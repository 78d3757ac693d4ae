"""One record for each program, with its live turns.

No clock and no I/O: every event has its time as an argument. Pins: retention/pin_table.py.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass, field

from continuum_lmcache.errors import InvariantError
from continuum_lmcache.programs.divergence import kept_hashes, no_hashes
from continuum_lmcache.types import NO_CALL, FinishedTurn, ProgramId, QueueEntry, Residency, ToolKey, TurnId

NOWHERE = Residency(0, 0, 0, 0)
MOST_HASHES = 4_000_000  # of all programs, 32 MB; then the longest-idle ones lose theirs


@dataclass(slots=True)
class Program:
    """An agent's run: turns of inference with tool calls between them."""

    id: ProgramId
    tenant: str
    arrival_s: float
    seen_s: float
    turns: int = 0  # finished
    attained_tokens: int = 0  # computed for it so far
    residency: Residency = NOWHERE  # of the last finished turn's context, below the GPU, when it ended
    live: set[TurnId] = field(default_factory=set)
    waiting: set[TurnId] = field(default_factory=set)  # live turns that have not run yet
    tool: ToolKey = ()  # called by the last finished turn
    answers: int = 0  # of the finished turns, those that called no tool
    finished_s: float | None = None  # when that turn finished; None if a later one is here
    hashes: array[int] = field(default_factory=no_hashes)  # of the last finished turn's whole blocks

    @property
    def context_tokens(self) -> int:
        """Of the last finished turn."""
        return self.residency.total_tokens

    @property
    def is_conversation(self) -> bool:
        """Whether no turn called a tool. A turn on another engine may have called one."""
        return self.answers == self.turns


@dataclass(frozen=True, slots=True)
class ProgramReturn:
    """A program's next turn is here, after this tool gap."""

    tool: ToolKey
    gap_s: float


@dataclass(slots=True)
class ProgramTable:
    """One record per program. Beyond `max_programs` the longest-idle ones are `idle_programs`."""

    max_programs: int
    records: OrderedDict[ProgramId, Program] = field(default_factory=OrderedDict)  # idle longest first
    _hashes: int = 0  # that the records hold

    def add_turn(
        self,
        now_s: float,
        turn: TurnId,
        program: ProgramId,
        tenant: str = "",
        since_s: float | None = None,
    ) -> ProgramReturn | None:
        """A turn of `program` joins the queue. Returns its tool gap, if the program was in one.

        `since_s`: the arrival of a program that is new here, if it was earlier.
        """
        entry = self.records.get(program)
        if entry is None:
            arrival_s = now_s if since_s is None else since_s
            entry = self.records[program] = Program(program, tenant, arrival_s, now_s)
        back = None
        if entry.finished_s is not None and not entry.live:
            back = ProgramReturn(entry.tool, now_s - entry.finished_s)
            entry.finished_s = None
        entry.live.add(turn)
        entry.waiting.add(turn)
        self._touch(now_s, entry)
        return back

    def start_turn(self, turn: TurnId, program: ProgramId) -> None:
        """A turn runs for the first time."""
        self.records[program].waiting.discard(turn)

    def finish_turn(
        self, now_s: float, turn_id: TurnId, turn: FinishedTurn, hashes: Sequence[Hashable] = ()
    ) -> None:
        """A turn ended in a tool call. `hashes`: of its whole blocks."""
        entry = self.records[turn.program]
        self.remove_turn(now_s, turn_id, turn.program)
        entry.turns += 1
        entry.tool, entry.finished_s = turn.tool, now_s
        entry.answers += turn.tool == NO_CALL
        entry.residency = turn.residency
        self._keep_hashes(entry, kept_hashes(entry.hashes, hashes))

    def remove_turn(self, now_s: float, turn: TurnId, program: ProgramId) -> None:
        """A turn ended or was aborted; the program may continue."""
        entry = self.records[program]
        entry.live.discard(turn)
        entry.waiting.discard(turn)
        self._touch(now_s, entry)

    def drop(self, program: ProgramId) -> Program:
        """Drop the record. No turn of it may be live, and its pin must have been released."""
        entry = self.records.pop(program)
        self._keep_hashes(entry, no_hashes())
        return entry

    def queue_entry(
        self,
        program: ProgramId | None,
        turn_arrival_s: float,
        place_s: float,
        priority: int,
        preempted: bool,
        pinned: bool,
        overdue_s: float,
    ) -> QueueEntry:
        """The values that a turn's place in the waiting queue may depend on."""
        entry = self.records.get(program) if program is not None else None
        return QueueEntry(
            preempted=preempted,
            pinned=pinned,
            priority=priority,
            program_arrival_s=entry.arrival_s if entry else turn_arrival_s,
            turn_arrival_s=turn_arrival_s,
            place_s=place_s,
            attained_tokens=entry.attained_tokens if entry else 0,
            overdue_s=overdue_s,
        )

    def idle_programs(self, now_s: float, idle_s: float, pinned: Container[ProgramId]) -> list[ProgramId]:
        """Programs without a live turn or a pin: no turn for `idle_s`, or beyond max_programs."""
        surplus = len(self.records) - self.max_programs
        found: list[ProgramId] = []
        for program, entry in self.records.items():
            if now_s - entry.seen_s < idle_s and len(found) >= surplus:
                break
            if not entry.live and program not in pinned:
                found.append(program)
        return found

    def check(self) -> None:
        """Raise InvariantError unless each record is consistent."""
        for entry in self.records.values():
            if len(entry.live) > 1:
                raise InvariantError(f"program {entry.id!r} has more than one live turn: {entry.live}")
            if not entry.waiting <= entry.live:
                raise InvariantError(f"program {entry.id!r}: waiting turns are not live: {entry.waiting}")
        if (held := sum(len(entry.hashes) for entry in self.records.values())) != self._hashes:
            raise InvariantError(f"block hashes({self._hashes}) != sum of programs({held})")

    def _keep_hashes(self, entry: Program, hashes: array[int]) -> None:
        """The program has these now. Above MOST_HASHES half of all are dropped: so that is rare."""
        self._hashes += len(hashes) - len(entry.hashes)
        entry.hashes = hashes
        if self._hashes > MOST_HASHES:
            for idle in self.records.values():
                if self._hashes <= MOST_HASHES // 2:
                    break
                self._hashes -= len(idle.hashes)
                idle.hashes = no_hashes()

    def _touch(self, now_s: float, entry: Program) -> None:
        entry.seen_s = now_s
        self.records.move_to_end(entry.id)
