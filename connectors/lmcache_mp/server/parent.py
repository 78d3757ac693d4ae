"""In an LMCache MP server that an engine started: it ends soon after that engine was killed.

An engine that shuts down ends its server. One that is killed cannot, and L1's memory would stay taken. While
other engines are connected to the server, it goes on for them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

from lmcache.logging import init_logger

logger = init_logger("lmcache.continuum")
STARTED_BY = "STARTED_BY_CONTINUUM_PID"  # in the environment of a server that an engine's worker starts
CHECK_S = 1.0
UNUSED_CHECKS = 3  # one after the other: an engine that starts connects again and again
ESTABLISHED, LISTENING = "01", "0A"  # in /proc/net/tcp


def end_with_parent(port: int) -> None:
    """Watch the worker that started this process, if one did."""
    if parent := os.environ.get(STARTED_BY):
        threading.Thread(target=_watch, args=(int(parent), port), daemon=True).start()


def _watch(parent: int, port: int) -> None:
    unused = 0
    while unused < UNUSED_CHECKS:
        time.sleep(CHECK_S)
        is_used = os.getppid() == parent or owners_of_sockets(port, ESTABLISHED)
        unused = 0 if is_used else unused + 1
    logger.warning("The engine that started this server is gone and nobody uses it: it ends")
    os.kill(os.getpid(), signal.SIGTERM)


def owners_of_sockets(port: int, state: str) -> set[int]:
    """The user ids of this machine's TCP sockets at a local port, in a state."""
    found = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                _, local, _, its_state, _, _, _, uid, *_ = line.split()
                if its_state == state and int(local.rpartition(":")[2], 16) == port:
                    found.add(int(uid))
    return found
