"""Which replica a program's turns go to, so that they find the KV its last turn left there.

A program's home is the replica of its first turn. Who places first turns itself keeps a table (Homes);
several routers that share no more than a key agree by a hash of the program's name (hashed).
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

from continuum_lmcache.types import ProgramId


def hashed(program: ProgramId, replicas: int, key: bytes) -> int:
    """The program's replica, of `replicas` >= 1, by rendezvous hashing.

    The same wherever `key` (1 to 64 bytes) is: who does not know it cannot choose names for one replica. One
    replica more takes its share of the programs and moves no other.
    Source: Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998.
    """
    name = program.encode("utf-8", "surrogatepass")

    def weight(replica: int) -> bytes:
        return blake2b(name, digest_size=8, key=key, salt=replica.to_bytes(8, "little")).digest()

    return max(range(replicas), key=weight)


class Homes:
    """The homes of at most `most` programs; of more, those unheard of for longest are forgotten."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._replicas: OrderedDict[ProgramId, int] = OrderedDict()

    def of(self, program: ProgramId) -> int | None:
        """Its replica; None: it has none yet."""
        found = self._replicas.get(program)
        if found is not None:
            self._replicas.move_to_end(program)
        return found

    def settles(self, program: ProgramId, replica: int) -> None:
        """A turn of the program went there, and the next one will."""
        self._replicas[program] = replica
        self._replicas.move_to_end(program)
        if len(self._replicas) > self.most:
            self._replicas.popitem(last=False)

    def leaves(self, program: ProgramId) -> None:
        """The program is over."""
        self._replicas.pop(program, None)

    def __len__(self) -> int:
        return len(self._replicas)

    def check(self) -> None:
        """Raise AssertionError if the table is not as it must be."""
        assert len(self._replicas) <= self.most, f"{len(self._replicas)} homes, {self.most} at most"
        assert all(replica >= 0 for replica in self._replicas.values()), "a replica has no number"
