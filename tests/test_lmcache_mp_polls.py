"""Polls of an LMCache server that is away, and what its tier module keeps and tells."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import pytest

pytest.importorskip("lmcache")

import zmq
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.multiprocess.transport.zmq_impl.client import ZmqMultiprocessClient
from lmcache.v1.multiprocess.transport.zmq_impl.mq import MessageQueueClient
from waiting import PATIENCE_S

from connectors.lmcache_mp import startup
from connectors.lmcache_mp.server.module import TierChangeLog
from connectors.lmcache_mp.startup import caller
from connectors.lmcache_mp.wire import ChangesRequest, chunk_name
from experiments.server import reserved_port


class Away:
    """LMCache's own ZMQ client, and a socket in place of its server that comes and goes."""

    def __init__(self) -> None:
        self._context, self.port = zmq.Context.instance(), reserved_port()
        queue = MessageQueueClient(f"tcp://127.0.0.1:{self.port}", self._context)
        self.client = ZmqMultiprocessClient(queue)
        self._call = caller(self.client)

    def polls(self, times: int) -> None:
        for _ in range(times):
            with pytest.raises(TimeoutError):
                self._call(b"", 0.001)

    def requests_at_return(self) -> int:
        """How many requests reach a server that starts now, answers nothing, and is gone again."""
        server, got = self._context.socket(zmq.ROUTER), 0
        server.bind(f"tcp://127.0.0.1:{self.port}")
        while server.poll(2000):
            server.recv_multipart()
            got += 1
        server.close(linger=0)
        return got

    def close_returns(self) -> bool:
        closing = threading.Thread(target=self.client.close, daemon=True)
        closing.start()
        closing.join(PATIENCE_S)
        return not closing.is_alive()


@pytest.fixture
def away() -> Iterator[Away]:
    yield Away()


def test_a_server_that_returns_gets_one_poll_however_many_were_due_and_later_ones(away: Away) -> None:
    away.polls(300)
    assert away.requests_at_return() == 1
    away.polls(50)  # the connection was closed, with that request
    assert away.requests_at_return() <= 1
    assert away.close_returns()


def test_an_engine_stops_though_its_socket_is_full(away: Away, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMCache's own pings fill it, too: a thousand."""
    monkeypatch.setattr(startup, "LOST_S", 0.0)
    for _ in range(1100):
        with pytest.raises(OSError):
            away._call(b"", 0.0)
    assert away.close_returns()


def test_the_module_keeps_nothing_for_models_that_it_does_not_have_or_has_no_more() -> None:
    registry = SimpleNamespace(find_attn_desc=lambda *_: SimpleNamespace(num_object_groups=1))
    log, key = TierChangeLog(registry), ObjectKey(b"h", "agents", ObjectKey.ComputeKVRank(1, 0, 1, 0))
    with log.lock:
        assert log.snapshot(("another", 1)) == []
    log.drop(True, [key])
    log.admit(True, [key])
    log.drop(True, [key])
    assert not log.disk_alone_has([key]) and not log._pieces


def test_a_name_tells_no_tenants_salt_and_differs_between_tenants() -> None:
    names = {chunk_name(b"hash" * 8, salt) for salt in ("", "tenant-a-secret", "tenant-b-secret")}
    assert len(names) == 3 and not any(b"secret" in name for name in names)


def test_a_request_that_names_its_scheduler_at_length_is_refused() -> None:
    payload = msgspec.msgpack.encode(ChangesRequest("agents", 1, scheduler="x" * 65))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(payload, type=ChangesRequest)
