"""A machine: its profile, and its card where that is known."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from continuum_lmcache.errors import ConfigError, ContinuumError, ProfileError, nearest
from continuum_lmcache.reload.cards import CARDS, Card, card_of
from continuum_lmcache.reload.cost_model import CostModel

MIB = 1024**2
GPU_BLOCK_TOKENS = 16  # vLLM's defaults
CPU_BLOCK_TOKENS = 128


@dataclass(frozen=True, slots=True)
class MachineSpec:
    source: str  # source of the costs
    costs: CostModel | None  # None: no profile was read
    device: str
    card: Card | None  # None: not known
    on_cpu: bool

    @property
    def block_tokens(self) -> int:
        return CPU_BLOCK_TOKENS if self.on_cpu else GPU_BLOCK_TOKENS


def machine(profile: Path | None, gpu: str) -> MachineSpec:
    """From a profile, a GPU's name, or both. Raises ConfigError or ProfileError."""
    gpu = gpu.lower()
    if gpu and gpu not in CARDS:
        raise ConfigError(f"--gpu is {gpu!r}; {nearest(gpu, CARDS)}; or give --memory-gib")
    if profile is None:
        return MachineSpec("the card's data sheet", None, gpu or "unknown", CARDS.get(gpu), False)
    found = read_object(profile, "a profile (profiles/README.md)", yaml.safe_load, ProfileError)
    costs = CostModel.from_mapping(found, str(profile))
    recorded = found.get("provenance")
    provenance = recorded if isinstance(recorded, Mapping) else {}  # for the reader: any value is possible
    device = gpu or str(provenance.get("device", "unknown"))
    on_cpu = "cores" in provenance  # profiles/measure.py notes them for a CPU only
    return MachineSpec(str(profile), costs, device, CARDS.get(device) or card_of(device), on_cpu)


def read_object(
    path: Path,
    expected: str,
    parse: Callable[[str], Any] = json.loads,
    wrong: type[ContinuumError] = ConfigError,
) -> dict[str, Any]:
    """The mapping in a file. Raises `wrong`, with what was `expected`."""
    try:
        found = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise wrong(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise wrong(f"{path} holds no object; expected {expected}")
    return found
