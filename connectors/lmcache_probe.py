"""A worker's answer to "what do your tiers hold?": for start, idle engines and doubt.

LMCache's own lookup is no way to ask: it pins what it finds and moves it up in the LRU. This one
copies the backends' keys, in a thread of the worker, over a ZMQ socket of its own.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence

import msgspec
import vllm.envs as envs
import zmq

POLL_MS = 200  # how long the server takes to notice that it should end


class Snapshot(msgspec.Struct):
    """All that one rank's tiers hold, after change number `last` or later."""

    rank: int
    last: int
    dram: list[int]
    ssd: list[int]
    pending_writes: int


class ProbeServer:
    """Answers each question with a fresh `snapshot()`, from its own thread, until closed."""

    def __init__(self, address: str, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.bind(address)
        self._running = True
        self._thread = threading.Thread(target=self._serve, name="continuum-tier-probe", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._running = False
        self._thread.join()

    def _serve(self) -> None:
        while self._running:
            if self._socket.poll(POLL_MS):
                asker, _ = self._socket.recv_multipart()
                self._socket.send_multipart([asker, msgspec.msgpack.encode(self._snapshot())])
        self._socket.close(linger=0)


class Probe:
    """The scheduler's side: asks all ranks and picks the answers up later. Never waits."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._waiting = 0
        self._sockets = []
        for address in addresses:
            socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
            socket.connect(address)
            self._sockets.append(socket)

    def ask(self) -> None:
        """Send the question, unless one is on its way."""
        if not self._waiting:
            for socket in self._sockets:
                socket.send(b"", zmq.NOBLOCK)
            self._waiting = len(self._sockets)

    def answers(self) -> Iterator[Snapshot]:
        """What has come in since."""
        for socket in self._sockets if self._waiting else ():
            while socket.poll(0):
                self._waiting -= 1
                yield msgspec.msgpack.decode(socket.recv(), type=Snapshot)

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)


def addresses(engine_id: str, ranks: int) -> list[str]:
    """The probe's socket of each rank. Short and unique: a socket's path has at most 107 bytes."""
    name = hashlib.blake2b(engine_id.encode(), digest_size=8).hexdigest()
    return [f"ipc://{envs.VLLM_RPC_BASE_PATH}/continuum-{name}-{rank}" for rank in range(ranks)]
