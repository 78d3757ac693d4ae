"""In the LMCache MP server: reports to connectors which chunks its L1 (DRAM) and L2 (disk) hold.

    lmcache server ... --server-module '{"module_path": "connectors.lmcache_mp_module"}'

LMCache's own lookup is not suitable: it locks what it finds and starts loads from L2. This module
listens to both tiers' managers, numbers every change, and answers with the changes since a client's last
request. An answer takes none of LMCache's locks and changes nothing.

Used members, as of LMCache 0.5.6: `--server-module` (ext_server_module.py), L1ManagerListener and
L2AdapterListener (distributed/internal_api.py), the event bus, and two private ones:
StorageManager._l1_managers_by_id, since only L2 has a public way to register a listener, and
_filename_to_object_key, since no adapter of files lists its keys. checksums.py names those of L2's adapters.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L1ManagerListener, L2AdapterListener
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import _filename_to_object_key
from lmcache.v1.multiprocess.ext_server_module import server_module_handler

from connectors.lmcache_mp.server.checksums import WatchedL2
from connectors.lmcache_mp.server.deadline import refuse_late_transfers
from connectors.lmcache_mp.server.lookup_log import LookupLog
from connectors.lmcache_mp.server.parent import end_with_parent
from connectors.lmcache_mp.wire import METHOD, ChangesReply, ChangesRequest, NumberedChange, chunk_name
from continuum_lmcache import __version__
from continuum_lmcache.bounded_dict import BoundedDict
from continuum_lmcache.config import parsed, refuse_unknown

LMCACHE_VERSION = metadata.version("lmcache")
SILENT_S = 30.0  # a scheduler that has asked nothing for so long has ended; each asks every 0.1 s
MAX_CHANGES = 200_000  # kept for clients; a client further behind gets a snapshot
MAX_OWNERS, MAX_SCHEDULERS = 1000, 1000  # kept; a server has a few
OF_FILES = ("fs", "fs_native")  # L2 adapters with a file for each piece, all in one directory
Owner = tuple[str, int]  # a model, and the number of pieces of a chunk's KV
Piece = tuple[int, int]  # rank and object group


class TierChangeLog(L1ManagerListener, L2AdapterListener):
    """Which chunks are complete in which tier, by owner, and the numbered changes. Any thread."""

    def __init__(self, registry: Any, max_changes: int = MAX_CHANGES) -> None:
        self.epoch = uuid.uuid4().hex
        self.number = 0
        self.lock = threading.Lock()
        self._registry, self._max_changes = registry, max_changes
        self._groups: BoundedDict[Owner, int] = BoundedDict(MAX_OWNERS)
        self._pieces: dict[tuple[Owner, bool], dict[bytes, set[Piece]]] = {}  # no table is empty
        self._changes: deque[tuple[Owner, NumberedChange]] = deque(maxlen=max_changes)

    def next_number(self) -> int:
        """The number of one more entry, of this log or one with its count. The caller holds the lock."""
        self.number += 1
        return self.number

    def admit(self, ssd: bool, keys: list[ObjectKey]) -> None:
        """Pieces are readable in a tier now; a repeated call changes nothing."""
        with self.lock:
            for key in keys:
                owner, name, piece = self._parts(key)
                pieces = self._pieces.setdefault((owner, ssd), {}).setdefault(name, set())
                if piece not in pieces:
                    pieces.add(piece)
                    if len(pieces) == self._pieces_per_chunk(owner):
                        self._note(owner, ssd, True, name)

    def drop(self, ssd: bool, keys: list[ObjectKey]) -> None:
        """Pieces are gone from a tier: the chunk is not complete there any more."""
        with self.lock:
            for key in keys:
                owner, name, piece = self._parts(key)
                held = self._pieces.get((owner, ssd), {})
                pieces = held.get(name, set())
                if piece in pieces:
                    if len(pieces) == self._pieces_per_chunk(owner):
                        self._note(owner, ssd, False, name)
                    pieces.remove(piece)
                    if not pieces:
                        del held[name]
                    if not held:
                        del self._pieces[owner, ssd]

    def since(self, owner: Owner, number: int) -> list[NumberedChange]:
        """An owner's changes after `number`, oldest first. The caller holds the lock."""
        newer = takewhile(lambda entry: entry[1].number > number, reversed(self._changes))
        return [change for of, change in newer if of == owner][::-1]

    def snapshot(self, owner: Owner) -> list[NumberedChange]:
        """All complete chunks in an owner's tiers. The caller holds the lock."""
        pieces_per_chunk = self._pieces_per_chunk(owner)
        return [
            NumberedChange(self.number, ssd, True, name)
            for ssd in (False, True)
            for name, pieces in self._pieces.get((owner, ssd), {}).items()
            if len(pieces) == pieces_per_chunk
        ]

    def disk_alone_has(self, keys: Iterable[ObjectKey]) -> bool:
        """Whether L2 has one of these pieces, and L1 lacks it."""
        with self.lock:
            for owner, name, piece in map(self._parts, keys):
                in_l1, in_l2 = (self._pieces.get((owner, ssd), {}).get(name, ()) for ssd in (False, True))
                if piece in in_l2 and piece not in in_l1:
                    return True
            return False

    def has_all_after(self, number: int) -> bool:
        """Whether the log still has every change after `number`. The caller holds the lock."""
        return len(self._changes) < self._max_changes or self._changes[0][1].number <= number + 1

    def _note(self, owner: Owner, ssd: bool, admitted: bool, name: bytes) -> None:
        self._changes.append((owner, NumberedChange(self.next_number(), ssd, admitted, name)))

    def _pieces_per_chunk(self, owner: Owner) -> int:
        """How many pieces a chunk of this owner has: ranks times object groups."""
        if owner not in self._groups:
            try:
                self._groups[owner] = self._registry.find_attn_desc(*owner).num_object_groups
            except ValueError:  # not registered with this server yet
                return owner[1]
        return owner[1] * self._groups[owner]

    @staticmethod
    def _parts(key: ObjectKey) -> tuple[Owner, bytes, Piece]:
        world_size = ObjectKey.WorldSizeFromKVRank(key.kv_rank)
        name = chunk_name(key.chunk_hash, key.cache_salt)
        return (key.model_name, world_size), name, (key.kv_rank, key.object_group_id)

    # what LMCache tells of both tiers, under L1's lock: so nothing else is done here

    def on_l1_keys_write_finished(self, keys: list[ObjectKey]) -> None:
        self.admit(False, keys)

    on_l1_keys_finish_write_and_reserve_read = on_l1_keys_write_finished

    def on_l1_keys_deleted_by_manager(self, keys: list[ObjectKey]) -> None:
        self.drop(False, keys)

    def on_l1_keys_accessed(self, keys: list[ObjectKey]) -> None:
        """Nothing enters or leaves L1, nor by the three events below."""

    on_l1_keys_reserved_read = on_l1_keys_accessed
    on_l1_keys_read_finished = on_l1_keys_accessed
    on_l1_keys_reserved_write = on_l1_keys_accessed

    def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: object = None) -> None:  # noqa: ARG002
        self.admit(True, keys)

    on_l2_keys_accessed = on_l2_keys_stored  # what was read is there: so others' chunks become known

    def on_l2_keys_deleted(self, keys: list[ObjectKey]) -> None:
        self.drop(True, keys)


def stored_before(adapter: Any) -> dict[ObjectKey, Path] | None:
    """What an L2 adapter (an L2AdapterDescriptor) held before this server stored anything, oldest first;
    None: unknown, or others may store there at any time."""
    if adapter.type_name not in OF_FILES or adapter.config.shared:
        return None
    try:
        files = sorted(Path(adapter.config.base_path).iterdir(), key=lambda file: file.stat().st_mtime)
    except OSError:
        return None
    named = {_filename_to_object_key(file.name): file for file in files}
    return {key: file for key, file in named.items() if key is not None}


class MpTierModule:
    """An LMCache engine module: the server calls its context, report_status and close."""

    def __init__(self, context: Any, checks: bool = True) -> None:
        self.context = context
        storage = context.storage_manager
        self._log = TierChangeLog(context.layout_desc_registry)
        for manager in storage._l1_managers_by_id.values():
            manager.register_listener(self._log)
        self._known_l2: set[int] = set()  # adapters of which the log has every chunk
        self._l2: list[WatchedL2] = []
        self._checks = checks
        for about, adapter in storage.l2_adapters():
            watched = self._watch(about, adapter)
            if (before := stored_before(about)) is not None:
                self._known_l2.add(about.index)
                self._log.admit(True, watched.adopt(before))
            watched.fit()
        storage.register_l2_listener(self._log)
        self._build, storage._build_l2_adapter = storage._build_l2_adapter, self.build_l2_adapter
        refuse_late_transfers(context)
        self._lookups = LookupLog(self._log, context, self._needs_l2)
        status = storage.report_status()
        evictions = status["l1_eviction_controllers"].values()
        self._read_lease_s = float(min(l1["read_ttl_seconds"] for l1 in status["l1_managers"].values()))
        # as configured: with --l1-use-lazy, LMCache's default on a GPU, it grows to that after its start
        self._l1_bytes = sum(int(l1["memory_configured_bytes"]) for l1 in status["l1_managers"].values())
        self._spare_share = 1.0 - max(float(eviction["trigger_watermark"]) for eviction in evictions)
        self._asked_s: dict[str, float] = {}  # when each scheduler last asked

    def report_status(self) -> dict[str, Any]:
        return {"continuum_tiers": {"epoch": self._log.epoch, "number": self._log.number}}

    def close(self) -> None:
        """Nothing to release."""

    @server_module_handler(METHOD)  # type: ignore[untyped-decorator]  # LMCache's
    def changes(self, payload: bytes) -> bytes:
        """The ChangesReply to a ChangesRequest, both as MessagePack. Raises msgspec.ValidationError."""
        request = msgspec.msgpack.decode(payload, type=ChangesRequest)
        owner, log = (request.model, request.world_size), self._log
        now_s = time.monotonic()
        # sizes first: LMCache takes L1's lock before the log's when it reports a change, so never after it
        dram_bytes, dram_spare_bytes, ssd_bytes = self._sizes()
        knows_all = self._knows_all()
        with log.lock:
            if request.scheduler and len(self._asked_s) < MAX_SCHEDULERS:
                self._asked_s[request.scheduler] = now_s
            self._asked_s = {name: s for name, s in self._asked_s.items() if now_s - s <= SILENT_S}
            known = request.epoch == log.epoch and log.has_all_after(request.number)
            reply = ChangesReply(
                epoch=log.epoch,
                number=log.number,
                is_snapshot=not known,
                changes=log.since(owner, request.number) if known else log.snapshot(owner),
                lookups=self._lookups.since(request.number) if known else [],
                dram_bytes=dram_bytes,
                ssd_bytes=ssd_bytes,
                dram_spare_bytes=dram_spare_bytes,
                read_lease_s=self._read_lease_s,
                hash_algorithm=self.context.token_hasher.hash_algorithm_name,
                clock_s=time.monotonic(),
                lmcache=LMCACHE_VERSION,
                continuum=__version__,
                schedulers=max(1, len(self._asked_s)),
                knows_all=knows_all,
                damaged_chunks=sum(l2.damaged_chunks for l2 in self._l2),
                failed_stores=sum(l2.failed_stores for l2 in self._l2),
            )
        return msgspec.msgpack.encode(reply)

    def build_l2_adapter(self, config: Any) -> Any:
        """StorageManager._build_l2_adapter: for one that is added while the server runs."""
        index, adapter, about = self._build(config)
        self._watch(about, adapter)
        return index, adapter, about

    def _watch(self, about: Any, adapter: Any) -> WatchedL2:
        folder = Path(about.config.base_path) if about.type_name in OF_FILES else None
        self._l2.append(WatchedL2(adapter, folder, self._checks))
        return self._l2[-1]

    def _knows_all(self) -> bool:
        adapters = self.context.storage_manager.l2_adapters()
        return all(adapter.index in self._known_l2 for adapter, _ in adapters)

    def _needs_l2(self, keys: Iterable[ObjectKey]) -> bool:
        return not self._knows_all() or self._log.disk_alone_has(keys)

    def _sizes(self) -> tuple[int, int, int | None]:
        """The bytes that L1 holds before it evicts, the rest of it, and the bytes that L2 holds before it
        evicts, if every adapter has a size. Above its watermark LMCache evicts within a second."""
        storage = self.context.storage_manager
        spare_bytes = round(self._spare_share * self._l1_bytes)
        disks = [
            adapter.get_usage().total_capacity_bytes
            * (about.config.eviction_config.trigger_watermark if about.config.eviction_config else 1.0)
            for about, adapter in storage.l2_adapters()
        ]
        ssd_bytes = round(sum(disks)) if all(disks) else None
        return self._l1_bytes - spare_bytes, spare_bytes, ssd_bytes


def build_server_modules(build: Any) -> MpTierModule:
    """The function that `--server-module` calls, with its `config`. Raises ConfigError."""
    refuse_unknown(build.config, ("checksums",), "", "--server-module's config")
    checks = parsed("checksums", build.config.get("checksums", True), "bool")
    end_with_parent(build.mp_config.port)
    return MpTierModule(build.server_context, checks)
