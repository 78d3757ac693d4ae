"""LMCache's MP mode on the oracle's GPU: its real connector and adapters, over a server that keeps keys.

The server answers as LMCache 0.5.6's does, some time after the request, and reads and writes vLLM's blocks
in its own order. There is no real time: threads do not start, and each wait advances virtual time.

    up         answers each message `lag` ticks after it came; a step of the worker has three
    silent     answers nothing until `silent_until_s`, then all
    gone       was killed: forgets what it held and was asked for; back at `gone_until_s`
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from bench import BLOCK
from kv_oracle import MOST_ADAPTERS, OracleBench, keys
from lmcache.integration.vllm import vllm_multi_process_adapter as adapters
from lmcache.v1.multiprocess.futures import MessagingFuture
from lmcache.v1.multiprocess.protocols.server_module import ServerModuleCallResponse
from lmcache.v1.multiprocess.token_hasher import TokenHasher
from lmcache.v1.multiprocess.transfer_context import worker_transfer
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from connectors.lmcache_mp import connector, transfer_watch
from connectors.lmcache_mp.server.deadline import is_late
from connectors.lmcache_mp.tier_mirror import ANSWER_S, POLL_S, TierPoller
from connectors.lmcache_mp.wire import ChangesReply, NumberedChange, chunk_name

Chunk = tuple[str, int]  # the salt, and the key that its last token has with the first weights
CHUNK = 256  # tokens, LMCache's default and a GPU's
LEASE_S = 300.0


class Reply(MessagingFuture[Any]):
    """The server's later answer. Waiting for it advances virtual time."""

    def __init__(self, server: SpanServer) -> None:
        super().__init__()
        self._server = server

    def wait(self, timeout: float | None = None) -> bool:
        return self._server.wait_for(self, timeout)

    def to_device_future(self, **_: Any) -> Reply:
        return self


class Message(NamedTuple):
    due: int  # tick
    reply: Reply
    action: Callable[[], Any]
    configs: dict[str, Any] | None  # of a move's key


class Lookup:
    """What one request's lookup found: locked until it is loaded or freed, or the lease ends."""

    def __init__(self, found: list[Chunk], at_s: float) -> None:
        self.found, self.at_s, self.locked = found, at_s, set(found)


class Client:
    """LMCache's RequestClient, of the scheduler's half or of the worker's."""

    def __init__(self, server: SpanServer) -> None:
        self.server = server
        socket = SimpleNamespace(setsockopt=lambda *_: None)
        self._message_queue_client = SimpleNamespace(cancel_streams=lambda: None, socket=socket)
        server.clients.append(self)

    def __getattr__(self, operation: str) -> Callable[..., Reply]:
        return partial(self.server.asked, operation)

    def close(self) -> None:
        pass


class SpanServer:
    """LMCache's MP server. The next `losing` loads load only their first chunk, and fail.

    Of a group of layers whose `windows` are shorter than a chunk it stores each chunk's last tokens.
    """

    def __init__(self, chunk: int) -> None:
        self.chunk, self.now_s = chunk, 1000.0
        self.slots: list[int] = []
        self.windows = [0]  # tokens of each group's; 0: its layers attend to all
        self.chunks: dict[Chunk, list[list[int]]] = {}  # keys in its slots, by group
        self.reported: dict[Chunk, bytes] = {}  # the names of chunks in the tier module's answers
        self.weights: dict[str, int] = {}  # by salt: those that computed all that is stored under it
        self.newest_weights: Callable[[], int] = lambda: 0
        self.knows_all = False  # whether it says that it reports all chunks
        self._hasher = TokenHasher(chunk, "blake3")
        self.spoilt: list[str] = []
        self.clients: list[Client] = []
        self.heartbeats: list[Any] = []
        self.lag = self.losing = self.lost = self.loads = 0
        self.silent_until_s = self.gone_until_s = 0.0
        self._is_waited_for = True
        self._tick = 0
        self._lanes: tuple[deque[Message], deque[Message]] = (deque(), deque())  # moves, and all else
        self._forget()

    def _forget(self) -> None:
        self.chunks.clear()
        for lane in self._lanes:
            lane.clear()
        self._registered: set[int] = set()
        self._lookups: dict[str, Lookup] = {}
        self._jobs: dict[str, int] = {}  # lookups with a result that was not queried yet

    # ---- its interface

    def asked(self, operation: str, *args: Any, **kwargs: Any) -> Reply:
        reply = Reply(self)
        is_move = operation in ("store", "retrieve")
        action = partial(getattr(self, "_" + operation, self._nothing), *args, **kwargs)
        configs = args[0].request_configs if is_move else None
        self._lanes[not is_move].append(Message(self._tick + self.lag, reply, action, configs))
        return reply

    @property
    def stands_still(self) -> bool:
        return self.now_s < max(self.silent_until_s, self.gone_until_s)

    def work(self) -> None:
        """One tick: execute due requests, in order of arrival."""
        if self.stands_still:
            return
        self._tick += 1
        for lane in self._lanes:
            while lane and lane[0].due <= self._tick:
                message = lane.popleft()
                if not is_late(message.configs, self.now_s):
                    message.reply.set_result(message.action())

    def wait_for(self, reply: Reply, timeout_s: float | None) -> bool:
        end_s = self.now_s + (60.0 if timeout_s is None else timeout_s)
        while not reply.query() and self.now_s < end_s and (self._is_waited_for or not self.stands_still):
            self.now_s = end_s if self.stands_still else self.now_s + 0.001
            self.work()
        return reply.query()

    @contextlib.contextmanager
    def not_waited_for(self) -> Iterator[None]:
        """Within it, waits happen in another thread, beside the steps."""
        self._is_waited_for = False
        yield
        self._is_waited_for = True

    def kill(self, seconds: float) -> None:
        """Kill it, and start it again this much later."""
        self._forget()
        self.gone_until_s = self.now_s + seconds
        for client in self.clients:
            client._message_queue_client.cancel_streams()

    def evict(self, every: int) -> None:
        """Evict chunks that no lookup holds."""
        held: set[Chunk] = set()
        for lookup in self._lookups.values():
            held |= lookup.locked if self.now_s < lookup.at_s + LEASE_S else set()
        for name in [name for name in self.chunks if name not in held][::every]:
            del self.chunks[name]

    # ---- its operations

    def _nothing(self, *_: Any) -> None:
        pass

    def _get_chunk_size(self) -> int:
        return self.chunk

    def _get_experimental(self) -> list[str]:
        return []

    def _ping(self, _: int | None) -> bool:
        return True

    def _register_kv_cache(self, instance: int, *_: Any) -> None:
        self._registered.add(instance)

    def _clear(self, **_: Any) -> None:
        self.evict(1)

    def _server_module_call(self, _: Any) -> ServerModuleCallResponse:
        held = [NumberedChange(self._tick, False, True, self.reported[last]) for last in self.chunks]
        reply = ChangesReply(
            *("epoch", self._tick, True, held, [], 1 << 40, 0, 1 << 40, LEASE_S, "blake3", self.now_s),
            *("", "", 1, self.knows_all),
        )
        return ServerModuleCallResponse(True, msgspec.msgpack.encode(reply), "")

    def _names(self, key: Any, start: int, end: int) -> list[Chunk]:
        ends = keys(list(key.token_ids[:end]))[start + self.chunk - 1 :: self.chunk]
        return [(key.cache_salt, end) for end in ends]

    def _lookup(self, key: Any, _: int) -> None:
        found = list(itertools.takewhile(self.chunks.__contains__, self._names(key, 0, key.end)))
        self._lookups[key.request_id] = Lookup(found, self.now_s)
        self._jobs[key.request_id] = len(found)

    def _query_prefetch_status(self, request_id: str) -> int:
        return self._jobs.pop(request_id, 0)

    def _free_lookup_locks(self, key: Any, _: int) -> None:
        if lookup := self._lookups.get(key.request_id):
            lookup.locked -= set(lookup.found[key.start // self.chunk : key.end // self.chunk])

    def _end_session(self, request_id: str) -> None:
        if lookup := self._lookups.pop(request_id, None):  # its locks stay until the lease ends
            self._lookups[f"{request_id} at {self._tick}"] = lookup

    def _retrieve(self, key: Any, instance: int, blocks: Any, _: bytes, skip: int) -> bool:
        names = self._names(key, key.start, key.end)
        lookup = self._lookups.get(key.request_id)
        if lookup is not None:
            lookup.locked -= set(names)
        if instance not in self._registered or not all(name in self.chunks for name in names):
            return False
        self.loads += 1
        losing, self.losing = bool(self.losing), max(self.losing - 1, 0)
        self.lost += losing
        for number, name in enumerate(names[:1] if losing else names):
            for group, held in zip(blocks, self.chunks[name], strict=True):
                end = (number + 1) * self.chunk
                for token, last in enumerate(held, end - len(held)):
                    if token >= skip:
                        self.slots[group[token // BLOCK] * BLOCK + token % BLOCK] = last
        return not losing

    def _store(self, key: Any, instance: int, blocks: Any, _: bytes) -> bool:
        if instance not in self._registered:
            return False
        salt, names, hashed = key.cache_salt, self._names(key, 0, key.end), self._hasher.none_hash
        for start, name in zip(range(0, key.end, self.chunk), names, strict=False):
            hashed = self._hasher.hash_tokens(list(key.token_ids[start : start + self.chunk]), hashed)
            self.reported[name] = chunk_name(self._hasher.hash_to_bytes(hashed), salt)
        tokens, newest = list(key.token_ids[: key.end]), self.newest_weights()
        by_weights = [
            keys(tokens, *each) for each in itertools.product(range(newest + 1), range(MOST_ADAPTERS))
        ]
        for start in range(key.start, key.end, self.chunk):
            end, held = start + self.chunk, []
            for group, window in zip(blocks, self.windows, strict=True):
                last = []
                for block in group[(start - key.start) // BLOCK :][: self.chunk // BLOCK]:
                    last += self.slots[block * BLOCK : (block + 1) * BLOCK]
                held.append(last[-window:])
            if self.chunks.setdefault(names[start // self.chunk], held) is not held:
                continue  # existing chunks are kept
            computed_by = [
                number
                for number, right in enumerate(by_weights)
                if all(right[end - len(last) : end] == last for last in held)
            ]
            if not computed_by or self.weights.setdefault(salt, computed_by[0]) != computed_by[0]:
                self.spoilt.append(f"tokens [{start}, {end}) of {key.request_id}, weights {computed_by}")
        return True


class ServerBench(OracleBench):
    """The oracle with an MP server. Within `in_one_process`. `settings` are LMCache's."""

    connector, module = "ContinuumLMCacheMPConnector", "connectors.lmcache_mp"
    ping_s = 5.0
    newest: SpanServer

    def __init__(self, *args: Any, chunk: int = CHUNK, settings: Any = None, **more: Any) -> None:
        self.lmcache = ServerBench.newest = SpanServer(chunk)
        self.settings = {"lmcache.mp.mp_transfer_mode": "lmcache_driven", **(settings or {})}
        self._poll_at_s = self._ping_at_s = self.lmcache.now_s
        super().__init__(*args, **more)

    @property
    def now_s(self) -> float:  # type: ignore[override]
        """The server's clock is the bench's."""
        return self.lmcache.now_s

    @now_s.setter
    def now_s(self, now_s: float) -> None:
        self.lmcache.now_s = now_s

    def join(self) -> Any:
        self.lmcache.slots = self.slots
        scheduler, connector = self.scheduler, self.scheduler.connector
        config, caches = scheduler.vllm_config, scheduler.kv_cache_config
        config.cache_config.kv_cache_layout = "LBHNC"
        with set_current_vllm_config(config):
            worker = type(connector)(config, KVConnectorRole.WORKER, caches)
            layers = [name for group in caches.kv_cache_groups for name in group.layer_names]
            memory = {name: torch.zeros(len(self.slots) // BLOCK, 1, BLOCK, 2) for name in layers}
            worker.register_kv_caches(memory)
        self._poller = getattr(connector, "_poller", None)
        if self._poller is not None:
            connector._leases._clock = self._poller._clock = lambda: self.now_s
            worker._worker._clock = worker._worker.watch._clock = lambda: self.now_s
        self.worker.meanwhile, self.lmcache.windows = self.lmcache.work, self.worker.windows
        self.lmcache.newest_weights = lambda: self.worker.weights
        return worker

    def spoilt(self) -> list[str]:
        return self.lmcache.spoilt

    def step(self, seconds: float | None = None) -> int:
        with self.lmcache.not_waited_for():
            self._background()
        return super().step(seconds)

    def _background(self) -> None:
        """The work of the threads beside the scheduler and the worker."""
        now_s, silent_s = self.now_s, 0.0
        if self.lmcache.stands_still:
            silent_s = now_s - self._heard_s
        else:
            self._heard_s = now_s
        if self._poller is not None and now_s >= self._poll_at_s and not 0 < silent_s < ANSWER_S:
            self._poll_at_s = now_s + POLL_S
            self._poller.try_poll()
        if now_s >= self._ping_at_s and not 0 < silent_s < self.ping_s:
            self._ping_at_s = now_s + self.ping_s
            for heartbeat in self.lmcache.heartbeats:
                heartbeat._execute()

    _heard_s = 0.0


class StockServerBench(ServerBench):
    """LMCache's own connector."""

    connector, module = "LMCacheMPConnector", "lmcache.integration.vllm.lmcache_mp_connector"
    ping_s = 10.0


def in_one_process(patched: pytest.MonkeyPatch) -> None:
    """LMCache without sockets, threads and CUDA events."""
    clock = SimpleNamespace(monotonic=lambda: ServerBench.newest.now_s)
    patched.setattr(adapters, "time", clock)
    patched.setattr(connector, "time", clock)
    create = lambda *_, **__: Client(ServerBench.newest)  # noqa: E731
    patched.setattr(adapters.RequestClientFactory, "create", create)
    patched.setattr(adapters.HeartbeatThread, "start", lambda it: it._req_client.server.heartbeats.append(it))
    patched.setattr(TierPoller, "start", lambda _: None)
    patched.setattr(TierPoller, "close", lambda _: None)
    patched.setattr(transfer_watch.TransferWatch, "_watch", lambda _: None)
    event = SimpleNamespace(query=lambda: True)
    events = SimpleNamespace(
        check_event_support=lambda _: None,
        create_event=lambda _: event,
        record_event=lambda *_: None,
        export_event=lambda *_: b"",
    )
    patched.setattr(worker_transfer, "get_event_ipc_backend", lambda _: events)
    patched.setattr(worker_transfer, "wrap_kv_caches", lambda caches: caches)
    patched.setattr(worker_transfer, "torch_dev", SimpleNamespace(current_stream=lambda: None))
    patched.setattr(
        worker_transfer,
        "create_transfer_context",
        lambda *_, **kw: worker_transfer.LMCacheDrivenTransferContext(kw["instance_id"], kw["req_client"]),
    )
    patched.setattr(adapters, "create_transfer_context", worker_transfer.create_transfer_context)
