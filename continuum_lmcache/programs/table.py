"""One record for each program, and the sums over them.

    active    programs with a turn that is queued, loading or running: their KV must be on the GPU
    started   these, and those in a tool call: theirs must be on the GPU or in a tier

Requests without a name are neither: they have no place, and take room only while they run.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections import Counter, OrderedDict
from collections.abc import Container
from dataclasses import dataclass, field

from continuum_lmcache.errors import InvariantError
from continuum_lmcache.programs.context_growth import ContextGrowth
from continuum_lmcache.programs.divergence import kept_hashes, no_hashes
from continuum_lmcache.programs.program import NOT_COUNTED, Counted, Left, Program, Stage
from continuum_lmcache.programs.prompt_linker import HashedPrompt
from continuum_lmcache.programs.shared_prefixes import SharedPrefix, SharedPrefixesInUse
from continuum_lmcache.types import FinishedTurn, Place, ProgramId, TurnId

MOST_HASHES = 4_000_000  # of all programs, 32 MB; then the longest-idle ones lose theirs
OVERDUE_A_STEP = 32  # each takes some 20 microseconds (LOG.md): so no step waits for a millisecond


@dataclass(slots=True)
class ProgramTable:
    """One record per program. Beyond `max_programs` the longest-idle ones are `idle_programs`."""

    max_programs: int
    growth: ContextGrowth = field(default_factory=ContextGrowth)
    records: OrderedDict[ProgramId, Program] = field(default_factory=OrderedDict)  # idle longest first
    in_stage: Counter[Stage] = field(default_factory=Counter)
    one_turn: int = 0  # records of requests without a name
    running_singles: dict[ProgramId, Program] = field(default_factory=dict)  # of these, the running ones
    started_tokens: float = 0.0  # forecasts, without the heads that programs share
    active_tokens: float = 0.0
    heads: SharedPrefixesInUse = field(default_factory=SharedPrefixesInUse)  # of the started programs
    _own_tokens: int = 0
    _hashes: int = 0  # that the records hold
    _away: list[tuple[float, ProgramId]] = field(default_factory=list)  # heap, by expected_until_s
    _told_ends: int = 0
    _untold_ends: int = 0  # overdue programs, and those that were overdue until they were dropped

    # a program's life ------------------------------------------------------

    def add(self, now_s: float, name: ProgramId, tenant: str, arrival_s: float, one_turn: bool) -> Program:
        program = self.records.get(name)
        if program is None:
            program = self.records[name] = Program(
                name, tenant, arrival_s, now_s, arrival_s, arrival_s, one_turn
            )
            self.in_stage[program.stage] += 1
            self.one_turn += one_turn
        return program

    def move(self, program: Program, stage: Stage) -> None:
        """The program does something else now, or as much with another context: count it so."""
        self.in_stage[program.stage] -= 1
        self.in_stage[stage] += 1
        program.stage = stage
        if stage is not Stage.IN_LINE:
            program.prompt_hashes = ()  # else a long prompt's hashes would outlive its request
        before, now = program.counted, self._counted(program)
        program.counted = now
        self.heads.take(now.head)
        self.heads.release(before.head)
        self._own_tokens += now.context_tokens - before.context_tokens
        self.started_tokens += now.started_tokens - before.started_tokens
        self.active_tokens += now.active_tokens - before.active_tokens

    def drop(self, program: Program) -> None:
        """Drop the record. It has no live turn, and its pin was released."""
        self._keep_hashes(program, no_hashes())
        self.move(program, Stage.IDLE)
        self.in_stage[Stage.IDLE] -= 1
        self.one_turn -= program.is_one_turn
        self.running_singles.pop(program.id, None)
        del self.records[program.id]

    # its turns -------------------------------------------------------------

    def add_turn(self, now_s: float, turn: TurnId, program: Program) -> float | None:
        """Its turn is here. Returns the tool gap in seconds, if the program was in one."""
        gap_s = None if program.finished_s is None else now_s - program.finished_s
        program.finished_s = None
        program.turn, program.is_waiting = turn, True
        self._touch(now_s, program)
        return gap_s

    def queue_turn(self, program: Program, prompt_tokens: int, head: SharedPrefix) -> None:
        """The turn may run. A program that is not counted yet has its prompt's tokens."""
        is_counted = program.stage in (Stage.ACTIVE, Stage.AWAY)
        program.context_tokens = max(program.context_tokens if is_counted else 0, prompt_tokens)
        program.ended_tokens = program.ended_tokens if is_counted else 0
        program.head, program.left = head, None
        self.move(program, Stage.SINGLE if program.is_one_turn else Stage.ACTIVE)

    def line_up(self, program: Program, prompt: HashedPrompt, priority: int) -> None:
        program.priority, program.prompt_hashes, program.left = priority, prompt.block_hashes, None
        program.held_for = ""
        program.context_tokens = prompt.num_prompt_tokens
        self.move(program, Stage.IN_LINE)

    def finish_turn(
        self, now_s: float, program: Program, turn: FinishedTurn, prompt: HashedPrompt, place: Place
    ) -> None:
        """The turn ended in a tool call, from which the program is expected back within `place.expected_s`.
        `prompt` has its output."""
        self._end_turn(now_s, program)
        program.turns += 1
        program.tool, program.finished_s, program.residency = turn.tool, now_s, turn.residency
        if program.ended_tokens:
            self.growth.add_turn(turn.context_tokens - program.ended_tokens)
        program.ended_tokens = program.context_tokens = turn.context_tokens
        program.reload_s, program.expected_until_s = turn.line_reload_s, now_s + place.expected_s
        self.move(program, Stage.AWAY if place.is_kept else Stage.YIELDED)
        heapq.heappush(self._away, (program.expected_until_s, program.id))
        away = self.in_stage[Stage.AWAY] + self.in_stage[Stage.YIELDED]
        if len(self._away) > 64 and len(self._away) > 2 * away:  # most are back
            self._away = [entry for entry in self._away if self._is_away(*entry)]
            heapq.heapify(self._away)
        self._keep_hashes(program, kept_hashes(program.hashes, prompt.block_hashes))

    def remove_turn(self, now_s: float, program: Program, keeps_standing: bool = True) -> None:
        """The turn failed or was aborted; the program may continue, and keeps its standing for a while."""
        program.left = Left(program.stage if keeps_standing else Stage.IDLE, now_s)
        self._end_turn(now_s, program)
        self.move(program, Stage.IDLE)

    # its end ---------------------------------------------------------------

    def expire_away(self, now_s: float, may_have_ended: bool = True) -> list[Program]:
        """The programs that should have returned by now are overdue. Returns those that count as ended until
        they return. Most clients never tell an end; where more ends were told than not, who is late has not
        ended. At most OVERDUE_A_STEP at a time; the others follow in the next steps."""
        found = []
        for _ in range(OVERDUE_A_STEP):
            if not self._away or self._away[0][0] > now_s:
                break
            until_s, name = heapq.heappop(self._away)
            if self._is_away(until_s, name):
                program = self.records[name]
                program.counts_as_ended = may_have_ended and self._untold_ends >= self._told_ends
                self.move(program, Stage.OVERDUE)
                self._untold_ends += 1
                if program.counts_as_ended:
                    self.growth.program_ended(program.turns)
                    found.append(program)
        return found

    def expect_again(self, program: Program) -> None:
        if program.stage is Stage.OVERDUE:
            self._untold_ends -= 1
            if program.counts_as_ended:
                self.growth.program_goes_on(program.turns)
            program.counts_as_ended = False

    def count_end(self, program: Program) -> None:
        """The program has ended after `program.turns`, if it had any."""
        if program.turns:
            self._told_ends += program.stage is not Stage.OVERDUE
            if not program.counts_as_ended:
                self.growth.program_ended(program.turns)

    def idle_programs(self, now_s: float, idle_s: float, pinned: Container[ProgramId]) -> list[Program]:
        """Programs without a live turn or a pin: no turn for `idle_s`, or beyond max_programs."""
        surplus = len(self.records) - self.max_programs
        found: list[Program] = []
        for program in self.records.values():
            if now_s - program.seen_s < idle_s and len(found) >= surplus:
                break
            if program.turn is None and program.id not in pinned:
                found.append(program)
        return found

    # answers ---------------------------------------------------------------

    @property
    def started(self) -> int:
        return self.in_stage[Stage.ACTIVE] + self.in_stage[Stage.AWAY]

    @property
    def live(self) -> int:
        """How many programs have a turn here, or are expected back from a tool call."""
        return self.started + self.in_stage[Stage.IN_LINE] + self.in_stage[Stage.YIELDED]

    @property
    def context_tokens(self) -> int:
        """Tokens that all programs have now, also those in line; a head in use counts once."""
        return self._own_tokens + self.heads.tokens

    def away(self) -> list[Program]:
        return [self.records[name] for until_s, name in self._away if self._is_away(until_s, name)]

    @property
    def waiting_singles(self) -> int:
        """How many requests that are no program's turn wait."""
        return self.in_stage[Stage.SINGLE] - len(self.running_singles)

    def check(self) -> None:
        """Raise InvariantError unless each record is consistent and the sums are those of the records."""
        programs = self.records.values()
        for program in programs:
            has_turn = program.stage in (Stage.IN_LINE, Stage.ACTIVE, Stage.SINGLE)
            if (program.turn is not None) is not has_turn or program.is_waiting > has_turn:
                raise InvariantError(f"program {program.id!r} is {program.stage.value}, turn {program.turn}")
            if program.stage in UNCOUNTED and program.counted != NOT_COUNTED:
                raise InvariantError(f"program {program.id!r} is {program.stage.value} and counted")
            if (program.id in self.running_singles) > (program.stage is Stage.SINGLE):
                raise InvariantError(f"request {program.id!r} runs, and is {program.stage.value}")
            if program.prompt_hashes and program.stage is not Stage.IN_LINE:
                raise InvariantError(f"program {program.id!r} is {program.stage.value} and keeps a prompt")
        for name, summed, counted in (
            ("context tokens", self._own_tokens, sum(p.counted.context_tokens for p in programs)),
            ("started tokens", self.started_tokens, sum(p.counted.started_tokens for p in programs)),
            ("active tokens", self.active_tokens, sum(p.counted.active_tokens for p in programs)),
            ("head tokens", self.heads.tokens, sum(h.tokens for h in {p.counted.head for p in programs})),
            ("block hashes", self._hashes, sum(len(p.hashes) for p in programs)),
            ("one-turn programs", self.one_turn, sum(p.is_one_turn for p in programs)),
            *((s.value, self.in_stage[s], sum(p.stage is s for p in programs)) for s in Stage),
        ):
            slack = 1.0 if isinstance(summed, float) else 0.0
            if not math.isclose(summed, counted, rel_tol=1e-6, abs_tol=slack):
                raise InvariantError(f"{name}({summed:.1f}) != sum of programs({counted:.1f})")

    def _counted(self, program: Program) -> Counted:
        if program.stage in UNCOUNTED:
            return NOT_COUNTED
        if program.stage in (Stage.IN_LINE, Stage.SINGLE):
            return Counted(program.context_tokens)
        own_tokens, is_active = program.own_tokens, program.stage is Stage.ACTIVE
        # in its first tool gap a program has not shown that it returns: it counts with what it holds
        grows = is_active or program.turns != 1
        forecast = self.growth.forecast_tokens(own_tokens, program.turns) if grows else own_tokens
        return Counted(own_tokens, forecast, forecast if is_active else 0.0, program.head)

    def _is_away(self, until_s: float, name: ProgramId) -> bool:
        """Whether the program has not come back since it was expected until then."""
        program = self.records.get(name)
        if program is None or program.stage not in (Stage.AWAY, Stage.YIELDED):
            return False
        return program.expected_until_s == until_s

    def _end_turn(self, now_s: float, program: Program) -> None:
        program.turn, program.is_waiting = None, False
        self._touch(now_s, program)

    def _keep_hashes(self, program: Program, hashes: array[int]) -> None:
        """The program has these now. Above MOST_HASHES half of all are dropped: so that is rare."""
        self._hashes += len(hashes) - len(program.hashes)
        program.hashes = hashes
        if self._hashes > MOST_HASHES:
            for idle in self.records.values():
                if self._hashes <= MOST_HASHES // 2:
                    break
                self._hashes -= len(idle.hashes)
                idle.hashes = no_hashes()

    def _touch(self, now_s: float, program: Program) -> None:
        program.seen_s = now_s
        self.records.move_to_end(program.id)


UNCOUNTED = (Stage.IDLE, Stage.YIELDED, Stage.OVERDUE)
