"""Decides which new programs may start. They wait in a line while the started programs fill the KV cache.

A started program returns for its next turn and needs its context again. When the GPU and the tiers hold as
much as they can, one more program makes all of them reload or recompute. In the line it needs no memory
(admission by working set: P. J. Denning, CACM 11(5), 1968; for agents CONCUR, arXiv 2601.22705).

    active    programs with a turn that is queued, loading or running: their KV must be on the GPU
    started   these, and those in a tool call: theirs must be on the GPU or in a tier

Two limits, one for each. No clock: times are arguments. Nothing here moves a block. Where programs take
turns on the GPU (`takes_turns`), the first limit does not apply.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from continuum_lmcache.admission.context_growth import ContextGrowth
from continuum_lmcache.admission.shared_prefixes import SharedPrefix, SharedPrefixesInUse, SharedPrefixIndex
from continuum_lmcache.bounded_dict import BoundedDict
from continuum_lmcache.errors import InvariantError
from continuum_lmcache.types import MOST_PROGRAMS, ProgramId

BUSY_SHARE = 0.35  # of the time for prompts: traces have 0.03 to 0.33, Table 1 0.57 to 0.70 (LOG.md)
ROOMY_TIMES = 2.0  # the GPU's cache; in a tier of 1.5 turn-taking costs 3 %, in 4 it gains (LOG.md)


@dataclass(frozen=True, slots=True)
class KVCapacity:
    """How many tokens' KV the admitted programs may need."""

    gpu_tokens: int  # for the active programs
    tier_tokens: int = 0  # for all started ones, if more than the GPU has: the largest cheap tier's


@dataclass(slots=True)
class AdmittedProgram:
    """A program that may queue its turns."""

    context_tokens: int  # with its shared head
    is_one_turn: bool = False  # a request without a program: it ends with its turn
    head: SharedPrefix = SharedPrefix()
    turns: int = 0  # finished
    live: bool = False  # its turn is queued, loading or running
    starts_anew: bool = False  # when it returns after it was absent
    counts_as_ended: bool = False  # while it is absent: `growth` has its turns
    ended_tokens: int = 0  # the last finished turn's context
    forecast_tokens: float = 0.0  # its part of the started programs' sum
    active_tokens: float = 0.0  # its part of the active programs' sum

    @property
    def own_tokens(self) -> int:
        """Its context without the shared head."""
        return max(0, self.context_tokens - self.head.tokens)


@dataclass(frozen=True, slots=True)
class PendingProgram:
    """A program that waits in line to start, or to start anew."""

    program: ProgramId
    prompt_tokens: int
    priority: int
    arrival_s: float
    hashes: Sequence[Hashable] = ()  # of its prompt's whole blocks
    finished: int = 0  # turns that ended before it was absent
    is_one_turn: bool = False


@dataclass(slots=True)
class AdmissionController:
    """The admitted programs and the line of pending ones, by priority and then by arrival."""

    capacity: KVCapacity
    max_wait_s: float
    growth: ContextGrowth = field(default_factory=ContextGrowth)
    shared_prefixes: SharedPrefixIndex = field(default_factory=lambda: SharedPrefixIndex(block_tokens=16))
    favors_started: Callable[[], bool] = lambda: True  # whether programs that began earlier go first
    admitted: dict[ProgramId, AdmittedProgram] = field(default_factory=dict)
    pending: dict[ProgramId, PendingProgram] = field(default_factory=dict)
    _line: list[tuple[int, float, ProgramId]] = field(default_factory=list)  # heap: priority, arrival
    _absent: list[tuple[float, ProgramId, int]] = field(default_factory=list)  # heap: no longer expected
    _started_tokens: float = 0.0  # forecasts of all admitted programs, without the heads they share
    _active_tokens: float = 0.0
    _heads: SharedPrefixesInUse = field(default_factory=SharedPrefixesInUse)  # by the admitted programs
    _context_tokens: int = 0  # of all programs, without the heads in use
    _first: tuple[ProgramId, float] | None = None  # first in line, and when it came
    _first_since_s: float = 0.0
    _told_ends: int = 0
    _untold_ends: int = 0  # absent programs, and those that were absent until they were dropped
    _given_up: BoundedDict[ProgramId, AdmittedProgram] = field(
        default_factory=lambda: BoundedDict(MOST_PROGRAMS)
    )

    def on_arrival(
        self,
        now_s: float,
        program: ProgramId,
        prompt_tokens: int,
        priority: int = 0,
        turns: int = 0,
        exempt: bool = False,
        hashes: Sequence[Hashable] = (),
        is_one_turn: bool = False,
    ) -> bool:
        """A turn of `program`, which has finished `turns`, has arrived. Returns whether it may queue now; if
        not, `admit` returns the program later. A started program never waits but to start anew (`on_pause`),
        nor does an `exempt` one. `hashes`: of its prompt's whole blocks. `is_one_turn`: it ends
        with its turn.
        """
        seen = self.admitted.get(program)
        starts = seen is None and (self._withdraw(program) or not turns)
        if starts and not exempt:
            pending = PendingProgram(program, prompt_tokens, priority, now_s, hashes, turns, is_one_turn)
            self.pending[program] = pending
            heapq.heappush(self._line, (priority, now_s, program))
            self._context_tokens += prompt_tokens
            if not turns and not is_one_turn:
                own_tokens = prompt_tokens - self.shared_prefixes.head(hashes).tokens
                self.growth.add_first_prompt(max(0, own_tokens))
            return False
        if seen is None:
            seen = self._add_admitted(program, turns)
        seen.live = True
        self._update(seen, max(seen.context_tokens, prompt_tokens), self.shared_prefixes.head(hashes))
        return True

    def add_request(self, request: ProgramId, prompt_tokens: int, hashes: Sequence[Hashable] = ()) -> None:
        """A request without a program has arrived. It never waits in the line, and needs room for its prompt
        until `remove_program`."""
        seen = self._add_admitted(request, 0)
        seen.live = seen.is_one_turn = True
        self._update(seen, prompt_tokens, self.shared_prefixes.head(hashes))

    def on_prefix_hit(self, program: ProgramId, hashes: Sequence[Hashable], tokens: int) -> None:
        """The program's first turn found `tokens` of its prompt in the cache: another program's head."""
        self.shared_prefixes.record_hit(hashes, tokens)
        if (seen := self.admitted.get(program)) is not None:
            self._update(seen, seen.context_tokens, self.shared_prefixes.head(hashes))

    def admit(self, now_s: float, idle: bool, prompt_share: float = 1.0) -> list[ProgramId]:
        """Admits the programs that may start now, first in line first. `idle`: the GPU has no other work.

        `prompt_share`: the share of the latest steps' time that prompts took. While it is small, one program
        a step starts without room: what it evicts is computed again in time that no other turn needs.
        """
        self.expire_absent(now_s)
        found: list[ProgramId] = []
        while (pending := self._next()) is not None:
            first = (pending.program, pending.arrival_s)  # one that left and came back is another
            if first != self._first:
                self._first, self._first_since_s = first, now_s
            size = (pending.prompt_tokens, pending.finished, pending.hashes, pending.is_one_turn)
            need = self._need_tokens(*size)
            # what fits into no empty engine waits for nothing: many such hold up the line no longer than one
            since_s = self._first_since_s if need <= self._most_tokens else pending.arrival_s
            is_let_in = idle or prompt_share < BUSY_SHARE or now_s - since_s >= self.max_wait_s
            if not (is_let_in or need <= self.headroom_tokens):
                break
            heapq.heappop(self._line)
            del self.pending[pending.program]
            self._context_tokens -= pending.prompt_tokens
            seen = self._add_admitted(pending.program, pending.finished)
            seen.live, seen.is_one_turn = True, pending.is_one_turn
            self._update(seen, pending.prompt_tokens, self.shared_prefixes.head(pending.hashes))
            found.append(pending.program)
            idle, prompt_share = False, 1.0
        return found

    def on_pause(
        self,
        now_s: float,
        program: ProgramId,
        context_tokens: int,
        expected_s: float,
        starts_anew: bool = False,
    ) -> None:
        """A turn ended in a tool call that should be over within `expected_s`; after that the program
        is not counted until it comes back. `starts_anew`: then it waits in the line as a new one."""
        if (seen := self.admitted.get(program)) is None:
            return
        seen.live = False
        seen.turns += 1
        seen.starts_anew = starts_anew
        if seen.ended_tokens:
            self.growth.add_turn(context_tokens - seen.ended_tokens)
        seen.ended_tokens = context_tokens
        self._update(seen, context_tokens)
        heapq.heappush(self._absent, (now_s + expected_s, program, seen.turns))
        if len(self._absent) > 64 and len(self._absent) > 2 * len(self.admitted):  # most of them are back
            self._absent = [entry for entry in self._absent if self._is_absent(*entry[1:])]
            heapq.heapify(self._absent)

    def remove_program(self, program: ProgramId, finished_turns: int = 0) -> None:
        """The program ended after `finished_turns`, or does not count here any more (0)."""
        seen = self.admitted.pop(program, None)
        if not finished_turns:
            self._withdraw(program)
        else:
            given_up = self._given_up.pop(program, None)
            self._told_ends += given_up is None
            if given_up is None or not given_up.counts_as_ended:
                self.growth.add_program(finished_turns)
        if (pending := self.pending.pop(program, None)) is not None:
            self._context_tokens -= pending.prompt_tokens
        if seen is not None:
            self._context_tokens -= seen.own_tokens
            self._heads.release(seen.head)
            self._started_tokens -= seen.forecast_tokens
            self._active_tokens -= seen.active_tokens

    def expire_absent(self, now_s: float) -> list[ProgramId]:
        """Removes the programs that should have returned by now, and returns those that count as ended until
        they return. Most clients never tell an end. Where more ends were told than not, an absent program
        has not ended.
        """
        found = []
        while self._absent and self._absent[0][0] <= now_s:
            _, program, turns = heapq.heappop(self._absent)
            if self._is_absent(program, turns):
                seen = self.admitted[program]
                seen.counts_as_ended = self._untold_ends >= self._told_ends
                self.remove_program(program)
                self._untold_ends += 1
                self._given_up[program] = seen
                if seen.counts_as_ended:
                    self.growth.add_program(seen.turns)
                    found.append(program)
        return found

    def _is_absent(self, program: ProgramId, turns: int) -> bool:
        """Whether the program has not come back since it had finished `turns`."""
        seen = self.admitted.get(program)
        return seen is not None and seen.turns == turns and not seen.live

    def _need_tokens(
        self, prompt_tokens: int, turns: int, hashes: Sequence[Hashable], is_one_turn: bool
    ) -> float:
        head = self.shared_prefixes.head(hashes)
        own_tokens = max(0, prompt_tokens - head.tokens)
        need = own_tokens if is_one_turn else self.growth.forecast_tokens(own_tokens, turns)
        return need + (0 if head in self._heads else head.tokens)

    @property
    def _most_tokens(self) -> float:
        """The largest forecast that fits into an empty engine."""
        return max(self.growth.forecasts_that_fit(self.capacity.gpu_tokens), self.capacity.tier_tokens)

    @property
    def headroom_tokens(self) -> float:
        """The largest forecast that fits beside the admitted programs; below 0 where they are too many."""
        fits = self.growth.forecasts_that_fit(self.capacity.gpu_tokens)
        room = max(fits, self.capacity.tier_tokens) - self._started_tokens
        if not self.takes_turns:
            room = min(room, fits - self._active_tokens)
        return room - self._heads.tokens

    @property
    def takes_turns(self) -> bool:
        """Whether started programs take turns on the GPU: a tier has room for many more of them, so a wait
        costs no KV, and nothing is gained by ending those first that began first (docs/decisions/0009)."""
        is_roomy = self.capacity.tier_tokens >= ROOMY_TIMES * self.capacity.gpu_tokens
        return is_roomy and not self.favors_started()

    @property
    def context_tokens(self) -> int:
        """Tokens that all programs have now, admitted and pending; a head in use counts once."""
        return self._context_tokens + self._heads.tokens

    def check(self) -> None:
        """Raise InvariantError unless the sums are those of the programs."""
        held = sum(s.own_tokens for s in self.admitted.values())
        held += sum(k.prompt_tokens for k in self.pending.values())
        if held != self._context_tokens:
            raise InvariantError(f"context tokens({self._context_tokens}) != sum of programs({held})")
        for name, of in (("started", "forecast_tokens"), ("active", "active_tokens")):
            summed = getattr(self, f"_{name}_tokens")
            counted = sum(getattr(seen, of) for seen in self.admitted.values())
            if not math.isclose(summed, counted, rel_tol=1e-6, abs_tol=1.0):
                raise InvariantError(f"{name} tokens({summed:.1f}) != sum of programs({counted:.1f})")

    # -----------------------------------------------------------------------

    def _withdraw(self, program: ProgramId) -> bool:
        """An absent program goes on, here or elsewhere. Returns whether it starts anew."""
        if (given_up := self._given_up.pop(program, None)) is None:
            return False
        self._untold_ends -= 1
        if given_up.counts_as_ended:
            self.growth.remove_program(given_up.turns)
        return given_up.starts_anew

    def _next(self) -> PendingProgram | None:
        """First in line; programs that left are skipped."""
        while self._line:
            _, arrival_s, program = self._line[0]
            pending = self.pending.get(program)
            if pending is not None and pending.arrival_s == arrival_s:
                return pending
            heapq.heappop(self._line)
        return None

    def _add_admitted(self, program: ProgramId, turns: int) -> AdmittedProgram:
        seen = self.admitted[program] = AdmittedProgram(0, turns=turns)
        self._heads.take(seen.head)
        return seen

    def _update(self, seen: AdmittedProgram, context_tokens: int, head: SharedPrefix | None = None) -> None:
        """The program's context has grown, or its number of turns has changed. `head`: its shared head, where
        that is looked up again."""
        own_tokens = seen.own_tokens
        seen.context_tokens = context_tokens
        if head is not None:
            self._heads.take(head)
            self._heads.release(seen.head)
            seen.head = head
        self._context_tokens += seen.own_tokens - own_tokens
        # in its first tool gap a program has not shown that it returns: it counts with what it holds
        grows = not seen.is_one_turn and (seen.live or seen.turns != 1)
        forecast = self.growth.forecast_tokens(seen.own_tokens, seen.turns) if grows else seen.own_tokens
        active = forecast if seen.live else 0.0
        self._started_tokens += forecast - seen.forecast_tokens
        self._active_tokens += active - seen.active_tokens
        seen.forecast_tokens, seen.active_tokens = forecast, active
