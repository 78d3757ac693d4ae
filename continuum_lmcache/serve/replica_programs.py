"""The programs that one replica serves, as a report for the state, which may have lost them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from continuum_lmcache.fleet.fleet import KnownProgram
from continuum_lmcache.types import ProgramId, TurnId


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A turn has its first token: its prompt's length is known and its prefill has ended."""

    turn: TurnId
    prompt_tokens: int
    body_bytes: int  # of the request; 0: not known


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """A turn has ended. `context_tokens` 0: its client left or it failed."""

    turn: TurnId
    context_tokens: int
    is_last: bool


TurnEvent = FirstToken | TurnEnd


@dataclass(slots=True)
class _Program:
    first_s: float
    turns: int  # finished
    context_tokens: int = 0  # of the last one
    live: set[TurnId] = field(default_factory=set)


@dataclass(slots=True)
class _Turn:
    program: ProgramId
    running: int = 0  # generations: a request may bring several prompts
    context_tokens: int = 0  # of the longest that finished; 0: none did
    has_first_token: bool = False  # its first token was reported


@dataclass(slots=True)
class ReplicaPrograms:
    """The programs of this replica, `most` at most (those idle longest are dropped), and their events.

    `on_end` is called as a turn ends.
    """

    most: int
    on_end: Callable[[], None] = lambda: None
    events: list[TurnEvent] = field(default_factory=list)
    _programs: OrderedDict[ProgramId, _Program] = field(default_factory=OrderedDict)
    _turns: dict[TurnId, _Turn] = field(default_factory=dict)

    def on_start(self, now_s: float, turn: TurnId, program: ProgramId, turns: int, age_s: float) -> None:
        """A turn's prompt enters the engine; the program had finished `turns` when it came here."""
        seen = self._programs.get(program)
        if seen is None:
            seen = self._programs[program] = _Program(now_s - age_s, turns)
            if len(self._programs) > self.most:
                self._programs.popitem(last=False)
        seen.turns = max(seen.turns, turns)  # it may have been elsewhere since
        self._programs.move_to_end(program)
        live = self._turns.setdefault(turn, _Turn(program))
        live.running += 1
        seen.live.add(turn)

    def on_first_token(self, turn: TurnId, prompt_tokens: int, body_bytes: int) -> None:
        """The prefill has ended."""
        live = self._turns[turn]
        if not live.has_first_token:
            live.has_first_token = True
            self.events.append(FirstToken(turn, prompt_tokens, body_bytes))

    def on_stop(self, turn: TurnId, context_tokens: int, is_last: bool) -> None:
        """The prompt's generation has ended, with a context of this many tokens; 0: it did not finish."""
        live = self._turns[turn]
        live.running -= 1
        live.context_tokens = max(live.context_tokens, context_tokens)
        if live.running:
            return
        del self._turns[turn]
        self.events.append(TurnEnd(turn, live.context_tokens, is_last))
        self.on_end()
        seen = self._programs.get(live.program)
        if seen is None:
            return
        seen.live.discard(turn)
        if live.context_tokens:
            seen.turns, seen.context_tokens = seen.turns + 1, live.context_tokens
        if is_last and not seen.live:
            del self._programs[live.program]

    def known(self, now_s: float) -> list[KnownProgram]:
        """Every program here, those idle longest first."""
        return [
            KnownProgram(name, p.turns, p.context_tokens, now_s - p.first_s, tuple(p.live))
            for name, p in self._programs.items()
        ]

    def __len__(self) -> int:
        return len(self._programs)
