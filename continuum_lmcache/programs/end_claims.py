"""How often each tenant's `is_last_step` was right: the KV of an ended program is evicted because of it."""

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
    tenant: str = ""  # identity.tenant_of


@dataclass(slots=True)
class EndClaims:
    """Programs whose clients reported their end, and how many of them returned."""

    claims: BoundedDict[str, int] = field(default_factory=lambda: BoundedDict(MAX_CLAIMS))  # by tenant
    wrong: BoundedDict[str, int] = field(default_factory=lambda: BoundedDict(MAX_CLAIMS))
    _by_program: BoundedDict[ProgramId, EndClaim] = field(default_factory=lambda: BoundedDict(MAX_CLAIMS))

    def claim(self, program: ProgramId, claim: EndClaim) -> None:
        """A client reports the program's end."""
        self.claims[claim.tenant] = self.claims.get(claim.tenant, 0) + 1
        self._by_program[program] = claim

    def withdraw(self, program: ProgramId) -> EndClaim | None:
        """A turn of the program arrives, so a claim of its end was wrong. Returns that claim; None: none."""
        claim = self._by_program.pop(program, None)
        if claim is not None:
            self.wrong[claim.tenant] = self.wrong.get(claim.tenant, 0) + 1
        return claim

    def is_trusted(self, tenant: str) -> bool:
        """Whether so few of its claims were wrong that eviction pays: a wrong one costs the whole context."""
        claims, wrong = self.claims.get(tenant, 0), self.wrong.get(tenant, 0)
        return wrong <= WRONG_SHARE * max(claims, LEAST_CLAIMS)
