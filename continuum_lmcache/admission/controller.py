"""Decides which programs have a place. The others wait in a line while the started ones fill the KV cache.

A started program returns for its next turn and needs its context again. When the GPU and the tiers hold as
much as they can, one more program makes all of them reload or recompute. In the line it needs no memory
(admission by working set: P. J. Denning, CACM 11(5), 1968; for agents CONCUR, arXiv 2601.22705).

Two limits: the active programs' KV must fit the GPU, that of all started ones the GPU or a tier (table.py).
A program keeps its place for a slice. Once a turn has waited for `max_hold_s`, who has had a slice goes
to the line's end. Where a place is not worth a tool gap, everybody does at every turn's end
(docs/decisions/0009). Requests without a name have no place: they run as memory is free. Those that run and
came before the line's head take room from it, those that came after it do not, else they could hold it back
for ever. Nobody stands in the line for longer than the bound that was shown when the turn came.
No clock: times are arguments. Nothing here moves a block.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from continuum_lmcache.programs.program import Program, Stage
from continuum_lmcache.programs.shared_prefixes import SharedPrefixIndex
from continuum_lmcache.programs.table import ProgramTable
from continuum_lmcache.types import ProgramId

BUSY_SHARE = 0.35  # of the time for prompts: traces have 0.03 to 0.33, Table 1 0.57 to 0.70 (LOG.md)
MOST_ETA = 0.75  # so a hold is at most four times as long
SLICE_RELOADS = 3.0  # of all programs with a place: so at most a third of the time goes into reloads
SLICE_TURNS = 5  # at least: so at most a fifth of the turns wait in the line
REFILL_GAPS = 1.5  # a place is not worth a tool gap if the GPU's whole cache is filled again in so many gaps
LEAST_GAP_S = 1.0  # and if the gap is no shorter: at 0.3 s a burst of programs ended a quarter later (LOG.md)
LONGEST_WAITS = 1.5  # mean waits: the 90th percentile where turns go by arrival
KEEPS = 1.25  # times each limit of the choice between places and sharing, before it changes back
RATE_TURNS = 32  # the latest, whose ends give the rate of turns
BOUND_HOLDS_S = 0.5  # for so long the bound of waits is not computed again


@dataclass(frozen=True, slots=True)
class KVCapacity:
    """How many tokens' KV the admitted programs may need."""

    gpu_tokens: int  # for the active programs
    tier_tokens: int = 0  # for all started ones, if more than the GPU has: the largest cheap tier's


class EndedInCall(NamedTuple):
    """A turn that ended in a tool call."""

    at_s: float
    gap_s: float  # the tool's mean gap
    refill_s: float  # the time in which such contexts fill the GPU's cache again


@dataclass(slots=True)
class AdmissionController:
    """The line of programs that wait for a place: by priority, then tenants by turns, then by arrival."""

    programs: ProgramTable
    capacity: KVCapacity
    max_hold_s: float  # a wait from which programs that have had their slice give their places up
    first_token_limit_s: float = 0.0  # all turns may wait so long, where a place is not worth a gap
    eta: Callable[[], float] = lambda: 0.0  # of eq. 2: near 1 if who began earlier is nearer the end
    shared_prefixes: SharedPrefixIndex = field(default_factory=lambda: SharedPrefixIndex(block_tokens=16))
    _turn_ends_s: deque[float] = field(default_factory=lambda: deque(maxlen=RATE_TURNS))
    _calls: deque[EndedInCall] = field(default_factory=lambda: deque(maxlen=RATE_TURNS))
    _shares_waits: bool = False  # nobody keeps a place, and nobody stands in the line
    _bound: tuple[float, float] = (-math.inf, 0.0)  # of waits: when it was computed, and its seconds
    _lines: OrderedDict[str, list[tuple[int, float, ProgramId]]] = field(default_factory=OrderedDict)
    """By tenant, whose turn it is first: a heap by priority and arrival, not empty."""

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

        A program with a place does not wait, nor an `exempt` one. One whose turn left and comes again stands
        where it stood. `hashes`: of its prompt's whole blocks.
        """
        head, kept = self.shared_prefixes.head(hashes), program.kept_stage(now_s)
        if exempt or Stage.AWAY is program.stage or kept is Stage.ACTIVE:
            self.programs.queue_turn(program, prompt_tokens, head)
            return
        if kept is not Stage.IN_LINE:
            if now_s - self._bound[0] >= BOUND_HOLDS_S:
                self._bound = (now_s, self._line_s())
            program.line_since_s, program.starts_by_s = now_s, now_s + self._bound[1]
        self.programs.line_up(program, prompt_tokens, priority, hashes)
        place = (priority, program.line_since_s, program.id)
        heapq.heappush(self._lines.setdefault(program.tenant, []), place)
        if not program.turns:
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
            need, waited_s = self._need_tokens(program), now_s - program.line_since_s
            fits_never = need > self._most_tokens and waited_s >= self.max_hold_s  # waiting brings it nothing
            if not (
                idle
                or self._shares_waits
                or prompt_share < BUSY_SHARE
                or fits_never
                or need <= self._room_tokens(program.line_since_s)
                or now_s >= program.starts_by_s
            ):
                break
            self._pop(program.tenant)
            program.since_s, program.order_s = now_s, program.line_since_s
            program.turns_before_place = program.turns
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
        """The largest forecast that fits beside all that have started; below 0 where they are too many."""
        return self._room_tokens(math.inf)

    def _room_tokens(self, came_s: float) -> float:
        """The same for one that came then: later requests without a name take no room from it."""
        programs = self.programs
        singles = sum(p.context_tokens for p in programs.running_singles.values() if p.arrival_s < came_s)
        fits = programs.growth.forecasts_that_fit(self.capacity.gpu_tokens)
        started_room = max(fits, self.capacity.tier_tokens) - programs.started_tokens
        return min(started_room, fits - programs.active_tokens) - programs.heads.tokens - singles

    @property
    def tier_keeps_waiting(self) -> bool:
        """Whether the tier has room for all programs' KV, so that it keeps that of one in line.

        Programs with a place write into the tier while others wait. If all do not fit together, a tier that
        evicts the oldest KV first has nothing left of who waited.
        """
        return self.programs.context_tokens <= self.capacity.tier_tokens

    @property
    def hold_s(self) -> float:
        """How long a turn waits before programs give way to it: longer where these are nearly done."""
        return self.max_hold_s / (1.0 - min(max(self.eta(), 0.0), MOST_ETA))

    def slice_s(self, reload_s: float) -> float:
        """How long a program keeps its place though others wait, by PrefillReload of its context.

        Each of n programs with a place gives it up once a slice. So reloads take n * `reload_s` a slice.
        """
        return SLICE_RELOADS * reload_s * self.programs.started

    def gives_up_place(
        self,
        now_s: float,
        program: Program,
        context_tokens: int,
        reload_s: float,
        gap_s: float,
        waiting_since_s: Collection[float],
    ) -> bool:
        """Whether a program whose turn ends gives its place up.

        `reload_s`: what its context costs after a wait in the line. `gap_s`: the tool's mean gap.
        `waiting_since_s`: when each of the turns came that wait, in the line or in the queue.

        In a refill, contexts like these fill all of the GPU's cache again: the memory of one context
        yields as much as the reload of one costs. So for longer gaps other programs use the memory better.
        That is decided for all programs, by the means of the latest turns.
        """
        refill_s = reload_s * self.capacity.gpu_tokens / max(1, context_tokens)
        self._calls.append(EndedInCall(now_s, gap_s, refill_s))
        is_waited_for = bool(waiting_since_s)
        self._shares_waits = self._is_worth_sharing(len(waiting_since_s))
        if self._shares_waits or not is_waited_for:
            return is_waited_for
        has_had_turns = program.turns + 1 - program.turns_before_place >= SLICE_TURNS
        has_had_slice = has_had_turns and now_s - program.since_s >= self.slice_s(reload_s)
        return has_had_slice and now_s - min(waiting_since_s) >= self.hold_s

    def on_turn_end(self, now_s: float) -> None:
        """A turn ended that had run, a program's or a request without a name."""
        self._turn_ends_s.append(now_s)

    def _is_worth_sharing(self, waiting: int) -> bool:
        """Whether places are not worth tool gaps, and first tokens come in time where all wait equally long.

        The mean wait is the number of waiting turns over turns a second, whoever waits (J. D. C. Little,
        Operations Research 9(3), 1961).
        """
        if not waiting or self.capacity.tier_tokens > self.capacity.gpu_tokens:
            return False
        keeps = KEEPS if self._shares_waits else 1.0
        gap_s, refill_s = sum(c.gap_s for c in self._calls), sum(c.refill_s for c in self._calls)
        wait_s = LONGEST_WAITS * waiting * mean_time_s(self._turn_ends_s)
        return (
            gap_s * keeps >= LEAST_GAP_S * len(self._calls)
            and refill_s < REFILL_GAPS * gap_s * keeps
            and wait_s < self.first_token_limit_s * keeps
        )

    @property
    def longest_wait_s(self) -> float:
        """How long a program that came now would wait for its place at most, beside the turns under way.

        0 where nobody waits and a usual program fits beside those with a place.
        """
        growth, programs = self.programs.growth, self.programs
        first_tokens = growth.forecast_tokens(round(growth.first_tokens), 0)
        is_queued = programs.in_stage[Stage.SINGLE] > len(programs.running_singles)
        fits_now = not (self.is_waited_for or is_queued) and first_tokens <= self.headroom_tokens
        return 0.0 if fits_now else self._line_s()

    def _line_s(self) -> float:
        """The same for one that must stand in the line."""
        programs, started = self.programs, self.programs.started
        latest_first = reversed(programs.records.values())  # so it ends before thousands that are overdue
        has_place = (p for p in latest_first if p.stage in (Stage.ACTIVE, Stage.AWAY))
        placed = list(islice(has_place, started))
        tenants = {*self._lines, *(program.tenant for program in placed)}
        of_one = min(programs.in_stage[Stage.IN_LINE], max(map(len, self._lines.values()), default=0))
        rounds = 1 + len(tenants) * of_one // max(1, started)
        slice_s = self.slice_s(max((p.reload_s for p in placed), default=0.0))
        turns_s = SLICE_TURNS * started * mean_time_s([call.at_s for call in self._calls])
        return self.hold_s + rounds * max(slice_s, turns_s)

    # -----------------------------------------------------------------------

    def _need_tokens(self, program: Program) -> float:
        """What the program in line would add to the started ones, in tokens."""
        head = self.shared_prefixes.head(program.prompt_hashes)
        own_tokens = max(0, program.context_tokens - head.tokens)
        need = self.programs.growth.forecast_tokens(own_tokens, program.turns)
        return need + (0 if head in self.programs.heads else head.tokens)

    @property
    def _most_tokens(self) -> float:
        """The largest forecast that fits into an empty engine."""
        fits = self.programs.growth.forecasts_that_fit(self.capacity.gpu_tokens)
        return max(fits, self.capacity.tier_tokens)

    def _next(self) -> Program | None:
        """First in line; programs that left are skipped."""
        while self._lines:
            tenant = min(self._lines, key=lambda name: self._lines[name][0][0])  # of equals the first
            _, arrival_s, name = self._lines[tenant][0]
            program = self.programs.records.get(name)
            if program is not None and program.stage is Stage.IN_LINE and program.line_since_s == arrival_s:
                return program
            self._pop(tenant, has_left=True)
        return None

    def _pop(self, tenant: str, has_left: bool = False) -> None:
        """The tenant's first in line has a place now, or has left. In the first case others go before it."""
        heapq.heappop(self._lines[tenant])
        if not self._lines[tenant]:
            del self._lines[tenant]
        elif not has_left:
            self._lines.move_to_end(tenant)


def mean_time_s(ends_s: Sequence[float]) -> float:
    """Mean time between turns' ends, oldest first, of which a step may have many; 0 before the second."""
    return (ends_s[-1] - ends_s[0]) / max(1, sum(e > ends_s[0] for e in ends_s)) if ends_s else 0.0
