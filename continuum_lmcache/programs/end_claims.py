"""How often each tenant's `is_last_step` was right: the KV of an ended program is evicted because of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from continuum_lmcache.bounded_dict import BoundedDict
from continuum_lmcache.programs.program import Program
from continuum_lmcache.types import ProgramId

MAX_CLAIMS = 4096  # remembered ones


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

    def counts(self, tenant: str) -> tuple[int, int]:
        """The tenant's claims, and how many of them were wrong."""
        return self.claims.get(tenant, 0), self.wrong.get(tenant, 0)
