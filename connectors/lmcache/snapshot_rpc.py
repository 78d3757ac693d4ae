"""Snapshots of a worker's tiers, for the start, for idle engines and after lost reports.

LMCache's own lookup is not suitable: it pins what it finds and moves it up in the LRU. This one
copies the backends' keys, in a thread of the worker, over a separate ZMQ socket.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import vllm.envs as envs
import zmq
from vllm.logger import init_logger

logger = init_logger("vllm.continuum.lmcache")
ANSWER_S = 30.0  # how long a rank's answer may take; then a later request goes to it again
POLL_MS = 200  # how long the server takes to notice that it should stop


class Snapshot(msgspec.Struct):
    """All that one rank's tiers hold, after change number `last` or later."""

    rank: int
    last: int
    dram: list[int]
    ssd: list[int]
    pending_writes: int


class SnapshotServer:
    """Answers each request with a new `snapshot()`, from its own thread, until closed."""

    def __init__(self, address: str, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.bind(address)
        self._running = True
        self._thread = threading.Thread(target=self._serve, name="continuum-tier-snapshots", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._running = False
        self._thread.join()

    def _serve(self) -> None:
        while self._running:
            if self._socket.poll(POLL_MS):
                client, _ = self._socket.recv_multipart()
                self._socket.send_multipart([client, msgspec.msgpack.encode(self._snapshot())])
        self._socket.close(linger=0)


class SnapshotClient:
    """The scheduler's side: sends a request to all ranks and takes the replies later. Never waits.

    For an unreachable rank (`ipc://` reaches no other node) the scheduler has its reports alone.
    """

    def __init__(self, addresses: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._addresses, self._clock = addresses, clock
        self._waiting: set[int] = set()  # ranks that have not answered the last request
        self._warned: set[int] = set()  # ranks for which a warning was logged
        self._requested_s = 0.0
        self._sockets = []
        for address in addresses:
            socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
            socket.connect(address)
            self._sockets.append(socket)

    def request(self) -> None:
        """Send a request, unless one is open."""
        if not self._waiting:
            for socket in self._sockets:
                with contextlib.suppress(zmq.Again):  # a thousand requests wait for this rank already
                    socket.send(b"", zmq.NOBLOCK)
            self._waiting, self._requested_s = set(range(len(self._sockets))), self._clock()

    def replies(self) -> Iterator[Snapshot]:
        """The replies since the last call."""
        for rank, socket in enumerate(self._sockets) if self._waiting else ():
            while socket.poll(0):
                self._waiting.discard(rank)
                yield msgspec.msgpack.decode(socket.recv(), type=Snapshot)
        if self._waiting and self._clock() - self._requested_s > ANSWER_S:
            self._give_up()

    def _give_up(self) -> None:
        """Stop waiting for the ranks that have not answered: the next `request` goes to all again."""
        for rank in sorted(self._waiting - self._warned):
            logger.warning(
                "LMCache's worker of rank %d has sent no snapshot of its tiers for %g s (%s): only its "
                "reports after each step are used. Nothing need be done if the rank is on another node",
                rank,
                ANSWER_S,
                self._addresses[rank],
            )
        self._warned |= self._waiting
        self._waiting = set()

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)


def addresses(engine_id: str, ranks: int) -> list[str]:
    """The snapshot socket of each rank. Short and unique: a socket's path has at most 107 bytes."""
    name = hashlib.blake2b(engine_id.encode(), digest_size=8).hexdigest()
    return [f"ipc://{envs.VLLM_RPC_BASE_PATH}/continuum-{name}-{rank}" for rank in range(ranks)]
