"""The programs that one replica serves, for its reports to the state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from continuum_lmcache.bounded_dict import BoundedDict
from continuum_lmcache.fleet.fleet import KnownProgram
from continuum_lmcache.types import MOST_PROGRAMS, ProgramId


@dataclass(slots=True)
class _Program:
    first_s: float
    turns: int = 0  # finished
    began_s: float = 0.0  # its latest turn
    live: int = 0  # prompts in flight


@dataclass(slots=True)
class ReplicaPrograms:
    """The programs of this replica by their names: those idle longest are dropped."""

    _programs: BoundedDict[ProgramId, _Program] = field(default_factory=lambda: BoundedDict(MOST_PROGRAMS))
    _changed: dict[ProgramId, None] = field(default_factory=dict)

    def on_start(self, now_s: float, names: Iterable[ProgramId], turns: int = 0, age_s: float = 0.0) -> None:
        """A turn's prompt enters the engine; its program had finished `turns` when it came here."""
        seen = next((self._programs[n] for n in names if n in self._programs), _Program(now_s - age_s))
        seen.turns, seen.began_s, seen.live = max(seen.turns, turns), now_s, seen.live + 1
        for name in names:
            self._programs[name] = seen
            self._changed[name] = None

    def on_stop(self, names: Iterable[ProgramId], is_finished: bool, is_last: bool) -> None:
        """The prompt's generation has ended. Prompts that ran at the same time are one turn. `is_last`: the
        program has ended; what is stored of it may go on."""
        seen = next((self._programs[n] for n in names if n in self._programs), None)
        if seen is not None:
            seen.live -= 1
            seen.turns += is_finished and not seen.live
        for name in names:
            self._changed[name] = None
            if is_last and seen is not None and not seen.live:
                self._programs.pop(name, None)
                return

    def report(self, now_s: float, is_complete: bool = False) -> list[KnownProgram]:
        """What has changed since the last call; or every program here, those idle longest first."""
        names, self._changed = [*(self._programs if is_complete else self._changed)], {}
        found = ((name, self._programs.get(name)) for name in names)
        return [
            KnownProgram(name, is_over=True)
            if seen is None
            else KnownProgram(name, seen.turns, now_s - seen.first_s, now_s - seen.began_s, seen.live > 0)
            for name, seen in found
        ]
