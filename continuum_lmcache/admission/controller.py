"""Decides which new programs may start. They wait in a line while the started programs fill the KV cache.

A started program returns for its next turn and needs its context again. When the GPU and the tiers hold as
much as they can, one more program makes all of them reload or recompute. In the line it needs no memory
(admission by working set: P. J. Denning, CACM 11(5), 1968; for agents CONCUR, arXiv 2601.22705).

Two limits: the active programs' KV must fit the GPU, that of all started ones the GPU or a tier (table.py).
If a tier holds twice what the GPU does, only the second limit applies: programs take turns on the GPU
(`oldest_program_first`). No clock: times are arguments. Nothing here moves a block.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from continuum_lmcache.programs.program import Program, Stage
from continuum_lmcache.programs.shared_prefixes import SharedPrefixIndex
from continuum_lmcache.programs.table import ProgramTable
from continuum_lmcache.types import ProgramId

BUSY_SHARE = 0.35  # of the time for prompts: traces have 0.03 to 0.33, Table 1 0.57 to 0.70 (LOG.md)
ROOMY_TIMES = 2.0  # the GPU's cache; in a tier of 1.5 turn-taking costs 3 %, in 4 it gains (LOG.md)


@dataclass(frozen=True, slots=True)
class KVCapacity:
    """How many tokens' KV the admitted programs may need."""

    gpu_tokens: int  # for the active programs
    tier_tokens: int = 0  # for all started ones, if more than the GPU has: the largest cheap tier's


@dataclass(slots=True)
class AdmissionController:
    """The line of programs that wait to start, by priority and then by arrival."""

    programs: ProgramTable
    capacity: KVCapacity
    max_wait_s: float
    shared_prefixes: SharedPrefixIndex = field(default_factory=lambda: SharedPrefixIndex(block_tokens=16))
    favors_started: Callable[[], bool] = lambda: True  # whether programs that began earlier go first
    _line: list[tuple[int, float, ProgramId]] = field(default_factory=list)  # heap: priority, arrival
    _first: tuple[ProgramId, float] | None = None  # first in line, and when it came
    _first_since_s: float = 0.0

    def on_arrival(
        self,
        now_s: float,
        program: Program,
        prompt_tokens: int,
        priority: int = 0,
        hashes: Sequence[Hashable] = (),
        exempt: bool = False,
    ) -> None:
        """A turn of the program is here: it may run, or waits in the line until `admit` starts the program.

        A started program waits only to start anew, and an `exempt` one never. `hashes`: of its prompt's whole
        blocks.
        """
        is_started = program.stage in (Stage.ACTIVE, Stage.AWAY)
        anew = program.stage is Stage.OVERDUE and program.starts_anew
        head = self.shared_prefixes.head(hashes)
        if is_started or exempt or (program.turns and not anew):
            self.programs.queue_turn(program, prompt_tokens, head)
            return
        self.programs.line_up(now_s, program, prompt_tokens, priority, hashes)
        heapq.heappush(self._line, (priority, now_s, program.id))
        if not program.turns and not program.is_one_turn:
            self.programs.growth.add_first_prompt(max(0, prompt_tokens - head.tokens))

    def on_prefix_hit(self, program: Program, hashes: Sequence[Hashable], tokens: int) -> None:
        """The program's first turn found `tokens` of its prompt in the cache: another program's head."""
        self.shared_prefixes.record_hit(hashes, tokens)
        program.head = self.shared_prefixes.head(hashes)
        self.programs.move(program, program.stage)

    def admit(self, now_s: float, idle: bool, prompt_share: float = 1.0) -> list[Program]:
        """Starts the programs that may start now, first in line first. `idle`: the GPU has no other work.

        `prompt_share`: the share of the latest steps' time that prompts took. While it is small, one program
        a step starts without room: what it evicts is computed again in time that no other turn needs.
        """
        found: list[Program] = []
        while (program := self._next()) is not None:
            first = (program.id, program.line_since_s)  # one that left and came back is another
            if first != self._first:
                self._first, self._first_since_s = first, now_s
            need = self._need_tokens(program)
            # what fits into no empty engine waits for nothing: many such hold up the line no longer than one
            since_s = self._first_since_s if need <= self._most_tokens else program.line_since_s
            is_let_in = idle or prompt_share < BUSY_SHARE or now_s - since_s >= self.max_wait_s
            if not (is_let_in or need <= self.headroom_tokens):
                break
            heapq.heappop(self._line)
            head = self.shared_prefixes.head(program.prompt_hashes)
            self.programs.queue_turn(program, program.context_tokens, head)
            found.append(program)
            idle, prompt_share = False, 1.0
        return found

    @property
    def is_waited_for(self) -> bool:
        """Whether a program waits in the line."""
        return self.programs.in_stage[Stage.IN_LINE] > 0

    @property
    def headroom_tokens(self) -> float:
        """The largest forecast that fits beside the started programs; below 0 where they are too many."""
        programs = self.programs
        fits = programs.growth.forecasts_that_fit(self.capacity.gpu_tokens)
        room = max(fits, self.capacity.tier_tokens) - programs.started_tokens
        if self.oldest_program_first:
            room = min(room, fits - programs.active_tokens)
        return room - programs.heads.tokens

    @property
    def oldest_program_first(self) -> bool:
        """Whether turns wait in the order in which their programs came. If not, started programs take turns
        on the GPU: a tier has room for many more of them, so a wait costs no KV, and nothing is gained by
        ending those first that began first (docs/decisions/0009)."""
        is_roomy = self.capacity.tier_tokens >= ROOMY_TIMES * self.capacity.gpu_tokens
        return self.favors_started() or not is_roomy

    # -----------------------------------------------------------------------

    def _need_tokens(self, program: Program) -> float:
        """What the program in line would add to the started ones, in tokens."""
        head = self.shared_prefixes.head(program.prompt_hashes)
        own_tokens = max(0, program.context_tokens - head.tokens)
        grows = not program.is_one_turn
        need = self.programs.growth.forecast_tokens(own_tokens, program.turns) if grows else own_tokens
        return need + (0 if head in self.programs.heads else head.tokens)

    @property
    def _most_tokens(self) -> float:
        """The largest forecast that fits into an empty engine."""
        fits = self.programs.growth.forecasts_that_fit(self.capacity.gpu_tokens)
        return max(fits, self.capacity.tier_tokens)

    def _next(self) -> Program | None:
        """First in line; programs that left are skipped."""
        while self._line:
            _, arrival_s, name = self._line[0]
            program = self.programs.records.get(name)
            if program is not None and program.stage is Stage.IN_LINE and program.line_since_s == arrival_s:
                return program
            heapq.heappop(self._line)
        return None
