"""How often each tenant's `is_last_step` was right: the KV of an ended program is evicted because of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from continuum_lmcache.bounded_dict import BoundedDict, FrequentDict
from continuum_lmcache.programs.program import Program
from continuum_lmcache.types import MOST_TENANTS, ProgramId

MAX_ENDED = 1024  # remembered programs of a tenant


@dataclass(slots=True)
class TenantClaims:
    claims: int = 0
    wrong: int = 0
    ended: BoundedDict[ProgramId, Program] = field(default_factory=lambda: BoundedDict(MAX_ENDED))


class EndClaims(FrequentDict[str, TenantClaims]):
    """By tenant: the programs whose clients reported their end, and how many of them returned."""

    def __init__(self) -> None:
        super().__init__(MOST_TENANTS, TenantClaims)

    def claim(self, program: Program) -> None:
        """A client reports the program's end; its record was dropped."""
        of = self.count(program.tenant)
        of.claims += 1
        of.ended[program.id] = program

    def withdraw(self, tenant: str, program: ProgramId) -> Program | None:
        """A turn of the program arrives, so a claim of its end was wrong. Returns its record; None: none."""
        of = self.get(tenant)
        ended = of.ended.pop(program, None) if of is not None else None
        if of is not None and ended is not None:
            of.wrong += 1
        return ended

    def counts(self, tenant: str) -> tuple[int, int]:
        """The tenant's claims, and how many of them were wrong."""
        of = self.get(tenant)
        return (0, 0) if of is None else (of.claims, of.wrong)
