"""Which replica a program's turns go to, so that they find the KV of its last turn there.

A program's home is the replica of its first turn. The process that places first turns keeps a table of them.
Processes that share only a key, or have lost the table, agree on a home by a hash.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import TypeVar

from continuum_lmcache.types import ProgramId

Replica = TypeVar("Replica", bound=int | str)
NAME_BYTES = 16  # of a program in the table


def hashed_replica(program: ProgramId, replicas: Iterable[Replica], key: bytes) -> Replica:
    """The program's replica, of one or more, by rendezvous hashing.

    Processes with the same `key` (1 to 64 bytes) agree. A client that does not know the key cannot choose
    names for one replica. A new replica takes its share of the programs, and no other program moves. The
    programs of a lost replica are divided among the others.
    Raises ValueError where there is no replica.
    Source: Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998.
    """
    name = digest(program, key)

    def weight(replica: Replica) -> tuple[bytes, str]:
        text = str(replica)
        return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, key=name).digest(), text

    return max(replicas, key=weight)


def digest(program: ProgramId, key: bytes) -> bytes:
    """A program's name, of NAME_BYTES. A ProgramId names its tenant too (identity.program_id)."""
    return blake2b(program.encode("utf-8", "surrogatepass"), digest_size=NAME_BYTES, key=key).digest()
