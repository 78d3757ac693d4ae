"""Do clients know when a program is over? Its KV is thrown away on their word."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from continuum_lmcache.types import ProgramId

REMEMBERED = 4096  # programs that were said to be over
LEAST_ENDINGS = 50  # so many are believed in advance
WRONG_SHARE = 0.02  # from which on nobody is believed


@dataclass(frozen=True, slots=True)
class EndClaim:
    """A program as it was when it was said to be over."""

    arrival_s: float
    turns: int


@dataclass(slots=True)
class EndClaims:
    """Programs that were said to be over, and how many of them came back."""

    said: int = 0
    wrong: int = 0
    _ended: OrderedDict[ProgramId, EndClaim] = field(default_factory=OrderedDict)

    def claim(self, program: ProgramId, ending: EndClaim) -> None:
        """The program is said to be over."""
        self.said += 1
        self._ended[program] = ending
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def withdraw(self, program: ProgramId) -> EndClaim | None:
        """A program arrives: what it was, if it was said to be over."""
        ending = self._ended.pop(program, None)
        self.wrong += ending is not None
        return ending

    @property
    def is_trusted(self) -> bool:
        """Whether so few came back that throwing away pays: a wrong word costs the whole context."""
        return self.wrong <= WRONG_SHARE * max(self.said, LEAST_ENDINGS)
