"""The scheduler's mirror of where LMCache's chunks are.

    worker      backend --ADMIT/EVICT--> ChangeLog --> TierReport, with every step's output
    scheduler   TierReport --> TierMirror <-- Snapshot <-- SnapshotServer

Both local backends report each change through `batched_msg_sender`, the interface for LMCache's own
controller. Every change has a number, so a snapshot and the reports around it may overlap.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from connectors.lmcache.snapshot_rpc import Snapshot, SnapshotClient
from connectors.lmcache.worker import RankReport, TierReport
from continuum_lmcache.bounded_dict import BoundedDict
from continuum_lmcache.reload.tier_store import KVTransfer, TierHit

MEMO_CHUNKS = 65_536  # chunk hashes remembered, about 12 MB
BEHIND_S = 1.0  # between requests while disk writes are pending: an answer of 400k chunks takes 45 ms
MAX_TRANSFERS = 10_000  # kept for a reader of transfers(), if there is one


class TierMirror:
    """Which chunks every rank holds in DRAM and on disk, by the workers' reports."""

    def __init__(self, ranks: int) -> None:
        self._held: list[tuple[set[int], set[int]]] = [(set(), set()) for _ in range(ranks)]
        self._last = [0] * ranks
        self._pending = [0] * ranks

    @property
    def is_behind(self) -> bool:
        """Whether the last report had a disk write in flight: no step reports its end."""
        return any(self._pending)

    def apply(self, rank: int, report: RankReport) -> bool:
        """Apply a report, unless a newer snapshot has it. False: an earlier report was lost."""
        last = self._last[rank]
        is_next = report.since <= last
        for number, ssd, admitted, chunk in report.changes:
            if number > last:
                held = self._held[rank][ssd]
                (held.add if admitted else held.discard)(chunk)
        if report.number > last:
            self._last[rank], self._pending[rank] = report.number, report.pending_writes
        return is_next

    def replace(self, snapshot: Snapshot) -> None:
        """Apply a snapshot, unless a later report was applied."""
        if snapshot.last >= self._last[snapshot.rank]:
            self._held[snapshot.rank] = (set(snapshot.dram), set(snapshot.ssd))
            self._last[snapshot.rank] = snapshot.last
            self._pending[snapshot.rank] = snapshot.pending_writes

    def plan(self, chunks: Iterable[int]) -> tuple[int, int]:
        """(chunks from DRAM, chunks from disk after them) that LMCache would load of this prefix.

        LMCache takes the leading run in DRAM, then the leading run of the rest on disk, then stops.
        It does not pick each chunk's best tier (`StorageManager.batched_contains`).
        """
        dram = ssd = 0
        for chunk in chunks:
            if not ssd and all(chunk in held[0] for held in self._held):
                dram += 1
            elif all(chunk in held[1] for held in self._held):
                ssd += 1
            else:
                break
        return dram, ssd


class ChunkHashes:
    """LMCache's own chunk hashes, cached: to hash 8k tokens takes a millisecond.

    `first`: the hash before the first chunk. `extend`: that of a chunk's tokens after another hash.
    The cache's key is Python's hash of a chunk's tokens and the hash before it. A collision gives a
    wrong estimate of where KV is, never wrong KV: LMCache computes its own hashes.
    """

    def __init__(
        self, first: Callable[[], Any], extend: Callable[[list[int], Any], Any], chunk_tokens: int
    ) -> None:
        self._first, self._extend, self._chunk_tokens = first, extend, chunk_tokens
        self._memo: BoundedDict[tuple[int, int], int] = BoundedDict(MEMO_CHUNKS)

    def of(self, token_ids: Sequence[int]) -> Iterator[int]:
        """The hash of each full chunk, lazily, head first."""
        before = self._first()
        for start in range(0, len(token_ids) - self._chunk_tokens + 1, self._chunk_tokens):
            chunk = token_ids[start : start + self._chunk_tokens]
            key = (before, hash(tuple(chunk)))
            found = self._memo.get(key)
            if found is None:
                found = self._memo[key] = self._extend(list(chunk), before)
            before = found
            yield found


class LMCacheTiers:
    """The core's TierStore over LMCache: answers from the mirror, and never waits."""

    def __init__(
        self,
        database: Any,
        chunk_tokens: int,
        addresses: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._chunk_tokens, self._clock = chunk_tokens, clock
        self._hashes = ChunkHashes(database._get_init_hash, database._hash_tokens, chunk_tokens)
        self._mirror = TierMirror(len(addresses))
        self._transfers: deque[KVTransfer] = deque(maxlen=MAX_TRANSFERS)
        self._step_s: float | None = None
        self._snapshot_client = SnapshotClient(addresses, clock)
        self._last_report_s = clock()  # when a worker last reported
        self._snapshot_client.request()

    def locate(self, token_ids: Sequence[int]) -> TierHit:
        for snapshot in self._snapshot_client.replies():
            self._mirror.replace(snapshot)
            self._last_report_s = self._clock()
        if self._mirror.is_behind and self._clock() - self._last_report_s > BEHIND_S:
            self.request_snapshot()  # no step has reported: the engine was idle
        dram_chunks, ssd_chunks = self._mirror.plan(self._hashes.of(token_ids))
        return TierHit(dram_chunks * self._chunk_tokens, ssd_chunks * self._chunk_tokens)

    def request_snapshot(self) -> None:
        """Request snapshots from the workers; a later `locate` applies their replies."""
        self._snapshot_client.request()

    def transfers(self) -> list[KVTransfer]:
        taken = list(self._transfers)
        self._transfers.clear()
        return taken

    def step_s(self) -> float | None:
        """The time of rank 0's last step, if it was timed."""
        taken, self._step_s = self._step_s, None
        return taken

    def apply_report(self, report: TierReport) -> None:
        self._last_report_s = self._clock()
        for rank, rank_report in report.ranks.items():
            self._transfers.extend(rank_report.transfers)
            self._step_s = rank_report.step_s if rank == 0 else self._step_s
            if not self._mirror.apply(rank, rank_report):
                self.request_snapshot()

    def close(self) -> None:
        self._snapshot_client.close()
