"""The conditions of a measurement: machine, versions, commit and speed."""

from __future__ import annotations

import math
import os
import platform
import resource
import subprocess
import time
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path

import numpy as np

from experiments.server import fast_dtype

ROOT = Path(__file__).resolve().parents[2]
MACHINE = "measured_on"
CONDITIONS = (MACHINE, "versions", "commit", "ended")  # columns


@cache
def machine() -> str:
    """A short description of this machine."""
    cpu = memory_gib = "unknown"
    if platform.system() == "Linux":
        info = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.partition(": ")[2] for line in info if line.startswith("model name")), cpu)
        memory_gib = f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f}"
    slow = ", no instructions for bfloat16" if fast_dtype() != "bfloat16" else ""
    return f"{cpu}, {os.cpu_count()} cores, {memory_gib} GiB{slow}"


def versions() -> str:
    """Python's and the engines'."""
    engines = ", ".join(f"{name} {version(name)}" for name in ("vllm", "lmcache", "torch"))
    return f"Python {platform.python_version()}, {engines}"


def conditions() -> dict[str, str]:
    """Of a row that is written now."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return dict(zip(CONDITIONS, (machine(), versions(), commit(), now), strict=True))


def commit() -> str:
    """The checkout's, with a + where files differ from it; "" where there is no checkout."""
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude", "*"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def when() -> str:
    """The date, and the checkout's commit: for a page, beside its figures."""
    return f"{datetime.now(UTC).date()}, commit {commit() or 'unknown'}"


def other_work_s() -> float:
    """CPU seconds that this machine has given to others than this process and its ended children, since some
    moment; two such values differ by what was given meanwhile. What the hypervisor took counts."""
    user, nice, system, _, _, irq, soft_irq, stolen = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    busy_s = (user + nice + system + irq + soft_irq + stolen) / os.sysconf("SC_CLK_TCK")
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return busy_s - sum(each.ru_utime + each.ru_stime for each in own)


def probe_s() -> float:
    """Seconds of a fixed piece of work on one core: products in its cache, and passes through memory.

    A virtual machine's speed changes within minutes. Two rows whose probes differ by a fifth do not compare.
    """
    small, large = np.ones((64, 64), np.float32), np.ones(2**24, np.float32)  # numpy has one thread for these
    best_s = math.inf
    for _ in range(3):
        began_s = time.perf_counter()
        for _ in range(4000):
            small @ small
        for _ in range(8):
            np.add(large, 1.0, out=large)
        best_s = min(best_s, time.perf_counter() - began_s)
    return best_s
