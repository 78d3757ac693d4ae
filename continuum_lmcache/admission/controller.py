"""The line of programs that wait for a place, and the latest turns' ends: what the policy is asked with.

`may_start`, `gives_up_place` and `longest_wait_s` of the policy decide (policy/interface.py). Requests
without a name have no place: they run as memory is free. Those that run and came before the line's head take
room from it, those that came after it do not, else they could hold it back for ever. Nobody stands in the
line for longer than the bound that was shown when the turn came. No clock: times are arguments. Nothing here
moves a block.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from continuum_lmcache.admission.served import Pace, served_in_time
from continuum_lmcache.config import ContinuumConfig
from continuum_lmcache.policy.interface import EngineState, FirstInLine, Line, Places, Policy, Room
from continuum_lmcache.programs.program import Program, Stage
from continuum_lmcache.programs.prompt_linker import HashedPrompt
from continuum_lmcache.programs.shared_prefixes import SharedPrefixIndex
from continuum_lmcache.programs.table import ProgramTable
from continuum_lmcache.programs.turns import TurnTable
from continuum_lmcache.types import FinishedTurn, Place, ProgramId, Start

RATE_TURNS = 32  # the latest, whose ends give the rate of turns
BOUND_HOLDS_S = 0.5  # for so long the bound of waits is not computed again
UNASKED = Place(True, "", math.inf)


@dataclass(frozen=True, slots=True)
class KVCapacity:
    """How many tokens' KV the admitted programs may need."""

    gpu_tokens: int  # for the active programs
    tier_tokens: int = 0  # for all started ones, if more than the GPU has: the largest cheap tier's

    @property
    def has_tier(self) -> bool:
        """Whether a tier has room for more started programs than the GPU."""
        return self.tier_tokens > self.gpu_tokens


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
    config: ContinuumConfig
    policy: Policy
    shared_prefixes: SharedPrefixIndex = field(default_factory=lambda: SharedPrefixIndex(block_tokens=16))
    last: Place = UNASKED  # the latest answer about a place
    came: list[Program] = field(default_factory=list)  # into the line since the last step
    _turn_ends_s: deque[float] = field(default_factory=lambda: deque(maxlen=RATE_TURNS))
    _calls: deque[EndedInCall] = field(default_factory=lambda: deque(maxlen=RATE_TURNS))
    _bound: tuple[float, float] = (-math.inf, 0.0)  # of waits: when it was computed, and its seconds
    _lines: OrderedDict[str, list[tuple[int, float, ProgramId]]] = field(default_factory=OrderedDict)
    """By tenant, whose turn it is first: a heap by priority and arrival, not empty."""

    def on_arrival(
        self, now_s: float, program: Program, prompt: HashedPrompt, priority: int = 0, exempt: bool = False
    ) -> None:
        """A turn of the program is here: it may run, or waits in the line until `admit` starts the program.

        A program with a place does not wait, nor an `exempt` one. One whose turn left and comes again stands
        where it stood.
        """
        head, kept = self.shared_prefixes.head(prompt.block_hashes), program.kept_stage(now_s)
        if exempt or Stage.AWAY is program.stage or kept is Stage.ACTIVE:
            self.programs.queue_turn(program, prompt.num_prompt_tokens, head)
            return
        if kept is not Stage.IN_LINE:
            if now_s - self._bound[0] >= BOUND_HOLDS_S:
                self._bound = (now_s, self._line_s())
            program.line_since_s, program.starts_by_s = now_s, now_s + self._bound[1]
        self.programs.line_up(program, prompt, priority)
        self.came.append(program)
        place = (priority, program.line_since_s, program.id)
        heapq.heappush(self._lines.setdefault(program.tenant, []), place)
        if not program.turns:
            self.programs.growth.add_first_prompt(max(0, prompt.num_prompt_tokens - head.tokens))

    def on_prefix_hit(self, program: Program, hashes: Sequence[Hashable], tokens: int) -> None:
        """The program's first turn found `tokens` of its prompt in the cache: another program's head."""
        self.shared_prefixes.record_hit(hashes, tokens)
        program.head = self.shared_prefixes.head(hashes)
        self.programs.move(program, program.stage)

    def admit(self, now_s: float, idle: bool, prompt_share: float = 1.0) -> list[tuple[Program, Start]]:
        """Asks for each program in line, first in line first, until one may not start. `idle`: the GPU has no
        other work. `prompt_share`: the share of the latest steps' time that prompts took."""
        asked = list[tuple[Program, Start]]()
        while self.policy.may_start is not None and (program := self._next()) is not None:
            first = FirstInLine(
                self._need_tokens(program),
                now_s - program.line_since_s,
                now_s >= program.starts_by_s,
                self._unnamed_tokens(program.line_since_s),
            )
            start = self.policy.may_start(first, self._room(idle, prompt_share))
            asked.append((program, start))
            if not start.may:
                break
            self._pop(program.tenant)
            program.placed_s, program.order_s = now_s, program.line_since_s
            program.turns_before_place = program.turns
            head = self.shared_prefixes.head(program.prompt_hashes)
            self.programs.queue_turn(program, program.context_tokens, head)
            idle, prompt_share = False, 1.0
        return asked

    @property
    def is_waited_for(self) -> bool:
        """Whether a program waits in the line."""
        return self.programs.in_stage[Stage.IN_LINE] > 0

    @property
    def programs_in_time(self) -> float | None:
        """How many live programs would have their first tokens in time; None: no program has a place."""
        programs, started = self.programs, self.programs.started
        if not started:
            return None
        away, yielded = programs.in_stage[Stage.AWAY], programs.in_stage[Stage.YIELDED]
        forecast_tokens = max(1.0, programs.started_tokens / started)  # of heads alone and no growth it is 0
        pace = Pace(forecast_tokens, away, yielded, mean_time_s(self._turn_ends_s))
        return served_in_time(self._room(False, 1.0), pace, self.config.first_token_limit_s)

    @property
    def headroom_tokens(self) -> float:
        """The largest forecast that fits beside all that have started; below 0 where they are too many."""
        return self._room(False, 1.0).free_tokens(self._unnamed_tokens(math.inf))

    def _room(self, idle: bool, prompt_share: float) -> Room:
        programs, capacity = self.programs, self.capacity
        return Room(
            self.config,
            programs.growth.forecasts_that_fit(capacity.gpu_tokens),
            capacity.tier_tokens,
            programs.active_tokens,
            programs.started_tokens,
            programs.heads.tokens,
            idle,
            prompt_share,
            self.last,
        )

    def _unnamed_tokens(self, came_s: float) -> int:
        """Of the running requests without a name that came before."""
        singles = self.programs.running_singles.values()
        return sum(p.context_tokens for p in singles if p.arrival_s < came_s)

    @property
    def tier_keeps_waiting(self) -> bool:
        """Whether the tier has room for all programs' KV, so that it keeps that of one in line.

        Programs with a place write into the tier while others wait. If all do not fit together, a tier that
        evicts the oldest KV first has nothing left of who waited.
        """
        return self.programs.context_tokens <= self.capacity.tier_tokens

    def place_of(self, now_s: float, turn: FinishedTurn, state: EngineState, turns: TurnTable) -> Place:
        """Whether a program whose turn ended in a tool call keeps its place: for ever if nobody decides."""
        if self.policy.gives_up_place is None:
            return UNASKED._replace(expected_s=state.expected_s)
        gap_s = state.gaps.most_specific(turn.tool).mean_s or 0.0
        refill_s = turn.line_reload_s * self.capacity.gpu_tokens / max(1, turn.context_tokens)
        self._calls.append(EndedInCall(now_s, gap_s, refill_s))
        calls = len(self._calls)
        places = Places(
            self.config,
            self.programs.started,
            self.capacity.has_tier,
            turns.waiting,
            turns.longest_wait_s(now_s),
            turns.late_share(self.config.first_token_limit_s),
            mean_time_s(self._turn_ends_s),
            sum(c.gap_s for c in self._calls) / calls,
            sum(c.refill_s for c in self._calls) / calls,
            self.last,
        )
        self.last = self.policy.gives_up_place(turn, state, places)
        return self.last

    def on_turn_end(self, now_s: float) -> None:
        """A turn ended that had run, a program's or a request without a name."""
        self._turn_ends_s.append(now_s)

    @property
    def longest_wait_s(self) -> float:
        """How long a program that came now would wait for its place at most, beside the turns under way.

        0 where nobody waits and a usual program fits beside those with a place.
        """
        growth, programs = self.programs.growth, self.programs
        first_tokens = growth.forecast_tokens(round(growth.first_tokens), 0)
        somebody_waits = self.is_waited_for or programs.waiting_singles
        fits_now = not somebody_waits and first_tokens <= self.headroom_tokens
        return 0.0 if fits_now else self._line_s()

    def _line_s(self) -> float:
        """The same for one that must stand in the line; infinite where the policy gives no bound."""
        if self.policy.longest_wait_s is None:
            return math.inf
        programs, started = self.programs, self.programs.started
        latest_first = reversed(programs.records.values())  # so it ends before thousands that are overdue
        has_place = (p for p in latest_first if p.stage in (Stage.ACTIVE, Stage.AWAY))
        placed = list(islice(has_place, started))
        tenants = {*self._lines, *(program.tenant for program in placed)}
        line = Line(
            self.config,
            started,
            len(tenants),
            min(programs.in_stage[Stage.IN_LINE], max(map(len, self._lines.values()), default=0)),
            self.capacity.has_tier,
            max((p.reload_s for p in placed), default=0.0),
            mean_time_s([call.at_s for call in self._calls]),
        )
        return self.policy.longest_wait_s(line)

    def _need_tokens(self, program: Program) -> float:
        """What the program in line would add to the started ones, in tokens."""
        head = self.shared_prefixes.head(program.prompt_hashes)
        own_tokens = max(0, program.context_tokens - head.tokens)
        need = self.programs.growth.forecast_tokens(own_tokens, program.turns)
        return need + (0 if head in self.programs.heads else head.tokens)

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
