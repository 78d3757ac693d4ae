"""A program's name in tables that no client's own words may reach."""

from __future__ import annotations

from hashlib import blake2b

from continuum_lmcache.types import ProgramId


def digest(program: ProgramId, key: bytes) -> bytes:
    """16 bytes, by a key of 1 to 64. A ProgramId names its tenant too (identity.program_id).

    Processes with the same key agree. A client that does not know it cannot choose names of one remainder.
    """
    return blake2b(program.encode("utf-8", "surrogatepass"), digest_size=16, key=key).digest()
