"""The programs that one replica serves and their turns in flight, for its reports to the state."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from continuum_lmcache.fleet.fleet import KnownProgram
from continuum_lmcache.reload.cost_model import UNMEASURED
from continuum_lmcache.types import ProgramId, TurnId


@dataclass(slots=True)
class _Program:
    first_s: float
    turns: int  # finished
    began_s: float = 0.0  # the latest turn
    context_tokens: int = 0  # of the last finished one
    live: set[TurnId] = field(default_factory=set)


@dataclass(slots=True)
class _Turn:
    names: tuple[ProgramId, ...]  # its program, and the name of its answer
    start_s: float
    held_tokens: int  # of the prompt: the program's last context, which the replica is taken to hold
    running: int = 0  # generations: a request may bring several prompts
    new_tokens: int = 0  # of the longest prompt
    context_tokens: int = 0  # of the longest that finished; 0: none did
    has_first_token: bool = False


@dataclass(slots=True)
class ReplicaPrograms:
    """The programs of this replica, `most` at most: those idle longest are dropped. `on_change` is called
    when the state should hear soon."""

    most: int
    on_change: Callable[[], None] = lambda: None
    _programs: OrderedDict[ProgramId, _Program] = field(default_factory=OrderedDict)
    _turns: dict[TurnId, _Turn] = field(default_factory=dict)
    _changed: dict[ProgramId, None] = field(default_factory=dict)
    _over: list[ProgramId] = field(default_factory=list)

    def on_start(
        self,
        now_s: float,
        turn: TurnId,
        program: ProgramId,
        turns: int = 0,
        age_s: float = 0.0,
        prompt_tokens: int = 0,
        answer: ProgramId | None = None,
    ) -> None:
        """A turn's prompt enters the engine; the program had finished `turns` when it came here. `answer`: a
        name by which the next turn may call this program, since the answer is stored here."""
        seen = self._programs.pop(program, None) or _Program(now_s - age_s, turns)
        seen.turns = max(seen.turns, turns)  # it may have been elsewhere since
        seen.began_s = now_s
        names = (program,) if answer is None else (program, answer)
        for name in names:
            self._programs[name] = seen
        while len(self._programs) > self.most:
            self._programs.popitem(last=False)
        if (live := self._turns.get(turn)) is None:
            live = self._turns[turn] = _Turn(names, now_s, seen.context_tokens)
        live.running += 1
        live.new_tokens = max(live.new_tokens, prompt_tokens - live.held_tokens)
        seen.live.add(turn)
        self._changed |= dict.fromkeys(names)
        if answer is not None:
            self.on_change()

    def on_first_token(self, turn: TurnId) -> None:
        """The prefill has ended."""
        self._turns[turn].has_first_token = True

    def on_stop(self, turn: TurnId, context_tokens: int, is_last: bool) -> None:
        """The prompt's generation has ended, with a context of this many tokens; 0: it did not finish."""
        live = self._turns[turn]
        live.running -= 1
        live.context_tokens = max(live.context_tokens, context_tokens)
        if live.running:
            return
        del self._turns[turn]
        self._changed |= dict.fromkeys(live.names)
        self.on_change()
        program = live.names[0]
        seen = self._programs.get(program)
        if seen is None:
            return
        seen.live.discard(turn)
        if live.context_tokens:
            seen.turns, seen.context_tokens = seen.turns + 1, live.context_tokens
        if is_last and not seen.live:
            del self._programs[program]
            self._over.append(program)

    def wait_s(self, now_s: float) -> float:
        """What a later turn would wait here before its prompt is computed, seconds.

        The time to compute the prompts before it, or for how long one of these has waited, if longer: then
        the replica is slower than UNMEASURED, or short of memory.
        """
        before = [t for t in self._turns.values() if not t.has_first_token]
        known_s = sum(UNMEASURED.prefill.seconds(t.new_tokens, t.held_tokens) for t in before)
        return max([known_s, *(now_s - t.start_s for t in before)])

    def report(self, now_s: float, is_complete: bool = False) -> list[KnownProgram]:
        """What has changed since the last call; or every program here, those idle longest first."""
        names = self._programs if is_complete else [n for n in self._changed if n in self._programs]
        over = [] if is_complete else [KnownProgram(n, 0, 0, 0.0, is_over=True) for n in self._over]
        self._changed, self._over = {}, []
        found = ((name, self._programs[name]) for name in names)
        return over + [
            KnownProgram(n, p.turns, p.context_tokens, now_s - p.first_s, now_s - p.began_s, bool(p.live))
            for n, p in found
        ]

    def __len__(self) -> int:
        return len(self._programs)
