"""How often `is_last_step` was right: the KV of an ended program is evicted because of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from continuum_lmcache.bounded_dict import BoundedDict
from continuum_lmcache.types import ProgramId

REMEMBERED = 4096  # ended programs
LEAST_ENDINGS = 50  # the share of wrong claims is not computed of fewer
WRONG_SHARE = 0.02  # above it, claims evict nothing


@dataclass(frozen=True, slots=True)
class EndClaim:
    """A program as it was when its client said that it ended."""

    arrival_s: float
    turns: int


@dataclass(slots=True)
class EndClaims:
    """Programs whose clients reported their end, and how many of them returned."""

    claims: int = 0
    wrong: int = 0
    _ended: BoundedDict[ProgramId, EndClaim] = field(default_factory=lambda: BoundedDict(REMEMBERED))

    def claim(self, program: ProgramId, ending: EndClaim) -> None:
        """A client reports the program's end."""
        self.claims += 1
        self._ended[program] = ending

    def withdraw(self, program: ProgramId) -> EndClaim | None:
        """A program arrives. Returns its claim if its end was reported."""
        ending = self._ended.pop(program, None)
        self.wrong += ending is not None
        return ending

    @property
    def is_trusted(self) -> bool:
        """Whether so few returned that eviction pays: a wrong claim costs the whole context."""
        return self.wrong <= WRONG_SHARE * max(self.claims, LEAST_ENDINGS)
