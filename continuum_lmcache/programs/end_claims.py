"""How often each tenant's `is_last_step` was right: the KV of an ended program is evicted because of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from continuum_lmcache.bounded_dict import BoundedDict
from continuum_lmcache.programs.program import Program
from continuum_lmcache.types import ProgramId

MAX_CLAIMS = 4096  # remembered ones
LEAST_CLAIMS = 50  # the share of wrong claims is computed as if there were at least as many
WRONG_SHARE = 0.02  # above it, claims evict nothing


@dataclass(slots=True)
class EndClaims:
    """Programs whose clients reported their end, and how many of them returned."""

    claims: BoundedDict[str, int] = field(default_factory=lambda: BoundedDict(MAX_CLAIMS))  # by tenant
    wrong: BoundedDict[str, int] = field(default_factory=lambda: BoundedDict(MAX_CLAIMS))
    ended: BoundedDict[ProgramId, Program] = field(default_factory=lambda: BoundedDict(MAX_CLAIMS))

    def claim(self, program: Program) -> None:
        """A client reports the program's end; its record was dropped."""
        self.claims[program.tenant] = self.claims.get(program.tenant, 0) + 1
        self.ended[program.id] = program

    def withdraw(self, program: ProgramId) -> Program | None:
        """A turn of the program arrives, so a claim of its end was wrong. Returns its record; None: none."""
        ended = self.ended.pop(program, None)
        if ended is not None:
            self.wrong[ended.tenant] = self.wrong.get(ended.tenant, 0) + 1
        return ended

    def is_trusted(self, tenant: str) -> bool:
        """True while at most WRONG_SHARE of the reported ends were wrong. A wrong one evicts a context that
        is needed again."""
        claims, wrong = self.claims.get(tenant, 0), self.wrong.get(tenant, 0)
        return wrong <= WRONG_SHARE * max(claims, LEAST_CLAIMS)
