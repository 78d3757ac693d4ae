"""Another machine for Ray, made of Linux namespaces: its own addresses, loopback, /dev/shm and processes.

So LMCache's server listens there on the port that it has here too, and is reached from there alone. `kill`
ends all at once, as a machine that loses its power. Needs root.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE, THERE = "10.213.7.1", "10.213.7.2"  # this machine's address on the cable between the two, and its
OWN_MEMORY = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'


def may_make_namespaces() -> bool:
    return os.geteuid() == 0 and subprocess.run(["unshare", "--net", "true"], check=False).returncode == 0


class Machine:
    def __init__(self, name: str, log: Path) -> None:
        self._name, self._log = name, log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, address: str, *options: str) -> None:
        """Join the cluster at `address` as `ray start` does there."""
        inside = ("ip", "netns", "exec", self._name)
        alone = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        ray = (sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--block")
        where = (f"--address={address}", f"--node-ip-address={THERE}")
        command = (*inside, *alone, "sh", "-c", OWN_MEMORY, "sh", *ray, *where, *options)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    @property
    def pid(self) -> int:
        """The parent of all that runs there."""
        assert self._process is not None, "the machine is off"
        return self._process.pid

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextlib.contextmanager
def machine(log: Path, ports: Sequence[int]) -> Iterator[Machine]:
    """A machine that is off, with a cable to this one. Nothing there gets one of `ports` by chance."""
    name = f"continuum-{os.getpid()}"
    ip("netns", "add", name)
    there = Machine(name, log)
    try:
        ip("link", "add", "continuum0", "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("addr", "add", f"{HERE}/30", "dev", "continuum0")
        ip("link", "set", "continuum0", "up")
        ip("-n", name, "addr", "add", f"{THERE}/30", "dev", "eth0")
        for link in ("eth0", "lo"):
            ip("-n", name, "link", "set", link, "up")
        reserved = f"net.ipv4.ip_local_reserved_ports={','.join(map(str, ports))}"
        ip("netns", "exec", name, "sysctl", "-qw", reserved)
        yield there
    finally:
        there.kill()
        ip("netns", "del", name)  # the cable goes with it


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
