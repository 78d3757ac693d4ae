"""How often `is_last_step` was right: the KV of an ended program is evicted because of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from continuum_lmcache.bounded_dict import BoundedDict
from continuum_lmcache.types import ProgramId

MAX_CLAIMS = 4096  # remembered ones
LEAST_CLAIMS = 50  # the share of wrong claims is computed as if there were at least as many
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
    _by_program: BoundedDict[ProgramId, EndClaim] = field(default_factory=lambda: BoundedDict(MAX_CLAIMS))

    def claim(self, program: ProgramId, claim: EndClaim) -> None:
        """A client reports the program's end."""
        self.claims += 1
        self._by_program[program] = claim

    def withdraw(self, program: ProgramId) -> EndClaim | None:
        """A turn of the program arrives, so a claim of its end was wrong. Returns that claim; None: none."""
        claim = self._by_program.pop(program, None)
        self.wrong += claim is not None
        return claim

    @property
    def is_trusted(self) -> bool:
        """Whether so few claims were wrong that eviction pays: a wrong one costs the whole context."""
        return self.wrong <= WRONG_SHARE * max(self.claims, LEAST_CLAIMS)
