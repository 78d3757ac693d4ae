"""The scheduler's mirror of an LMCache MP server's tiers, updated by its own thread.

    MP server   L1, L2 --> TierChangeLog --reply--> TierPoller (thread) --> MpTierMirror <-- locate
                event bus --> LookupLog --'              '--> LoadLookupJoin <-- the worker's timed loads

The scheduler reads sets in its own process and never waits. What the server has not reported yet is not
found, and nothing is found once the server has not answered for MAX_AGE_S.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
from vllm.logger import init_logger

from connectors.lmcache_mp.load_join import LoadLookupJoin, MpReport
from connectors.lmcache_mp.wire import ChangesReply, ChangesRequest, LookupResult, chunk_name
from continuum_lmcache.bounded_dict import BoundedDict
from continuum_lmcache.reload.tier_store import NOTHING, KVTransfer, TierHit
from continuum_lmcache.types import Tier

logger = init_logger("vllm.continuum.lmcache")
POLL_S = 0.1  # between an answer and the next request
ANSWER_S = 2.0  # how long an answer may take; then the server counts as dead
MAX_AGE_S = 5.0  # an older mirror is not used
MEMO_CHUNKS = 65_536  # chunk hashes remembered, about 12 MB
MAX_TRANSFERS = 10_000  # kept for a reader of transfers(), if there is one

Call = Callable[[bytes, float], bytes]
"""(payload, timeout_s) -> payload: one exchange with the server's tier module. Raises OSError."""


class MpTierMirror:
    """Which chunks the server's L1 and L2 hold. One thread writes; others may read meanwhile."""

    def __init__(self) -> None:
        self._stored: tuple[set[bytes], set[bytes]] = (set(), set())
        self.epoch: str | None = None
        self.number = 0

    def apply_report(self, reply: ChangesReply) -> None:
        stored: tuple[set[bytes], set[bytes]] = (set(), set()) if reply.is_snapshot else self._stored
        for change in reply.changes:
            tier = stored[change.ssd]
            (tier.add if change.admitted else tier.discard)(change.chunk)
        self._stored, self.epoch, self.number = stored, reply.epoch, reply.number

    def plan(self, names: Iterable[bytes]) -> tuple[int, int]:
        """(chunks from L1, chunks from L2) that a lookup would find of this prefix.

        The server takes each chunk from L1 where it can and the missing ones from L2, so the two may
        alternate (`DefaultPrefetchPolicy.plan_load`). The first chunk that is in neither ends the prefix.
        """
        in_l1, in_l2 = self._stored
        dram = ssd = 0
        for name in names:
            if name in in_l1:
                dram += 1
            elif name in in_l2:
                ssd += 1
            else:
                break
        return dram, ssd


class TierPoller:
    """Polls the server for changes from its own thread, and notes whether it answers."""

    def __init__(
        self,
        call: Call,
        request: ChangesRequest,
        on_down: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._call, self._request, self._on_down, self._clock = call, request, on_down, clock
        self.mirror = MpTierMirror()
        self.knows_all = False  # whether the mirror has every chunk of the tiers, or others store in L2 too
        self.schedulers = 1  # that use the server, this one included
        self.tier_bytes: dict[Tier, int] = {}  # that the tiers hold before they evict
        self.spare_bytes = 0  # of L1, for what is read from L2
        self.lookups: deque[LookupResult] = deque(maxlen=MAX_TRANSFERS)
        self.faults: Counter[str] = Counter(damaged_chunk=0, failed_store=0)  # of L2, since the first answer
        self._counted: dict[str, int] = {}  # of these, by this process of the server
        self.is_up = True
        self._answered_s = clock()
        self._requested_s: float | None = None  # when the request without an answer was sent
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._poll_until_closed, name="continuum-mp-tiers", daemon=True
        )

    @property
    def is_fresh(self) -> bool:
        return self._clock() - self._answered_s < MAX_AGE_S

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(2 * ANSWER_S)

    def poll(self, timeout_s: float = ANSWER_S) -> ChangesReply:
        """One request; applies its answer. Blocks: not for the scheduler's thread. Raises OSError."""
        if self._requested_s is None:
            self._requested_s = self._clock()
        since = {"epoch": self.mirror.epoch, "number": self.mirror.number}
        request = msgspec.structs.replace(self._request, **since)
        payload = self._call(msgspec.msgpack.encode(request), timeout_s)
        try:
            reply = msgspec.msgpack.decode(payload, type=ChangesReply)
        except msgspec.MsgspecError as error:
            raise ConnectionError(
                f"its answer cannot be read: {error}; run the same release on both sides"
            ) from error
        self._count_faults(reply)
        self.mirror.apply_report(reply)
        self.lookups += reply.lookups
        if reply.schedulers != self.schedulers:
            text = "vLLM schedulers on LMCache's server: %d; each counts on an equal part of its tiers"
            logger.info(text, reply.schedulers)
        self.schedulers, self.knows_all = reply.schedulers, reply.knows_all
        sizes = {Tier.DRAM: reply.dram_bytes, Tier.SSD: reply.ssd_bytes or 0}
        self.tier_bytes = {tier: size for tier, size in sizes.items() if size}
        self.spare_bytes = reply.dram_spare_bytes
        self._answered_s, self._requested_s = self._requested_s, None
        return reply

    def _count_faults(self, reply: ChangesReply) -> None:
        counted = {"damaged_chunk": reply.damaged_chunks, "failed_store": reply.failed_stores}
        before = self._counted if reply.epoch == self.mirror.epoch else {}
        for fault, count in counted.items():
            if count > before.get(fault, 0):
                if not self.faults[fault]:
                    text = "LMCache's server reports a first %s of its disk; its own log names each"
                    logger.warning(text, fault.replace("_", " "))
                self.faults[fault] += count - before.get(fault, 0)
        self._counted = counted

    def _poll_until_closed(self) -> None:
        while not self._stopping.wait(POLL_S):
            self.try_poll()

    def try_poll(self) -> None:
        try:
            self.poll()
        except OSError as error:
            if self.is_up and not self._stopping.is_set():
                self.is_up = False
                text = "LMCache's MP server does not answer (%s): prompts are computed until it does"
                logger.warning(text, error)
                self._on_down()
            return
        if not self.is_up:
            self.is_up = True
            logger.info("LMCache's MP server answers again")


class MpTiers:
    """The core's TierStore over an MP server: answers from the mirror, and never waits."""

    def __init__(
        self,
        poller: TierPoller,
        hasher: Any,
        bytes_per_token: int,
        longest_prompt_tokens: int = 0,
        block_tokens: int = 1,
    ) -> None:
        """`block_tokens`: what one of vLLM's block hashes adds."""
        self._block_tokens = block_tokens
        self._poller, self._bytes_per_token = poller, bytes_per_token
        self._longest_prompt_tokens = longest_prompt_tokens
        self._hasher, self._chunk_tokens = hasher, hasher.chunk_size
        self._hashes: BoundedDict[Hashable, Any] = BoundedDict(MEMO_CHUNKS)
        self._join = LoadLookupJoin()
        self._transfers: deque[KVTransfer] = deque(maxlen=MAX_TRANSFERS)

    @property
    def mirror_number(self) -> int | None:
        """The number of the newest change that `locate` knows; None while the server does not answer."""
        return self._poller.mirror.number if self._poller.is_fresh else None

    @property
    def spare_tokens(self) -> int:
        """How many tokens L1 keeps free: a longer load from L2 fails."""
        return self._poller.spare_bytes // self._bytes_per_token

    def locate(self, token_ids: Sequence[int], salt: str, block_hashes: Sequence[Hashable] = ()) -> TierHit:
        """`block_hashes`: vLLM's, if they cover these tokens and no others."""
        if not self._poller.is_fresh:
            return NOTHING
        dram_chunks, ssd_chunks = self._poller.mirror.plan(self._names(token_ids, salt, block_hashes))
        return TierHit(dram_chunks * self._chunk_tokens, ssd_chunks * self._chunk_tokens)

    def transfers(self) -> list[KVTransfer]:
        self.apply_report(MpReport([]))
        taken = list(self._transfers)
        self._transfers.clear()
        return taken

    def capacity_tokens(self) -> dict[Tier, int]:
        """This scheduler's part, for all its ranks together: L1 and L2 hold every rank's pieces.

        As of the latest answer: the server may have been started again with other sizes. L2 counts only if
        L1 keeps room for the longest prompt: else its loads fail, and the programs are computed.
        """
        token_bytes = self._bytes_per_token * self._poller.schedulers
        found = {tier: size // token_bytes for tier, size in self._poller.tier_bytes.items()}
        if self.spare_tokens < self._longest_prompt_tokens:
            found.pop(Tier.SSD, None)
        return found

    def apply_report(self, report: MpReport) -> None:
        lookups = [self._poller.lookups.popleft() for _ in range(len(self._poller.lookups))]
        self._transfers += self._join.join(report.loads, lookups)

    def _names(
        self, token_ids: Sequence[int], salt: str, block_hashes: Sequence[Hashable]
    ) -> Iterator[bytes]:
        """Of each full chunk, lazily, head first.

        LMCache's own hashes, remembered: to hash 8k tokens takes a millisecond. The key is vLLM's hash of the
        chunk's last block, which covers all tokens before it; else Python's hash of the chunk's tokens, and
        the hash before it. A collision gives a wrong estimate of where KV is, never wrong KV: LMCache
        computes its own hashes.
        """
        chunk_hash, size = self._hasher.none_hash, self._chunk_tokens
        if size % self._block_tokens:
            block_hashes = ()
        for end in range(size, len(token_ids) + 1, size):
            key: Hashable
            if (blocks := end // self._block_tokens) <= len(block_hashes):
                key = block_hashes[blocks - 1]
            else:
                key = (chunk_hash, hash(tuple(token_ids[end - size : end])))
            if key not in self._hashes:
                self._hashes[key] = self._hasher.hash_tokens(list(token_ids[end - size : end]), chunk_hash)
            chunk_hash = self._hashes[key]
            yield chunk_name(self._hasher.hash_to_bytes(chunk_hash), salt)
