"""A machine: its profile, and its card where that is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from continuum_lmcache.errors import ConfigError, ProfileError, nearest
from continuum_lmcache.reload.cards import CARDS, Card, card_of
from continuum_lmcache.reload.cost_model import CostModel

MIB = 1024**2
GPU_BLOCK_TOKENS = 16  # vLLM's defaults
CPU_BLOCK_TOKENS = 128


@dataclass(frozen=True, slots=True)
class MachineSpec:
    """The known properties of the machine to serve on."""

    source: str  # source of the costs
    costs: CostModel | None  # None: no profile was read
    device: str
    card: Card | None  # None: not known
    on_cpu: bool

    @property
    def block_tokens(self) -> int:
        """vLLM's default block."""
        return CPU_BLOCK_TOKENS if self.on_cpu else GPU_BLOCK_TOKENS


def machine(profile: Path | None, gpu: str) -> MachineSpec:
    """From a profile, a GPU's name, or both. Raises ConfigError or ProfileError."""
    gpu = gpu.lower()
    if gpu and gpu not in CARDS:
        raise ConfigError(f"--gpu is {gpu!r}; {nearest(gpu, CARDS)}; or give --memory-gib")
    if profile is None:
        return MachineSpec("the card's data sheet", None, gpu or "unknown", CARDS.get(gpu), False)
    found = read(profile)
    costs = CostModel.from_mapping(found, str(profile))
    recorded = found.get("provenance")
    provenance = recorded if isinstance(recorded, Mapping) else {}  # for the reader: any value is possible
    device = gpu or str(provenance.get("device", "unknown"))
    on_cpu = "cores" in provenance  # profiles/machine.py notes them for a CPU only
    return MachineSpec(str(profile), costs, device, CARDS.get(device) or card_of(device), on_cpu)


def read(path: Path) -> Mapping[str, Any]:
    """The YAML mapping of a profile. Raises ProfileError."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ProfileError(f"profile {path}: {' '.join(str(error).split())}") from error
    if not isinstance(found, Mapping):
        raise ProfileError(f"profile {path} holds no mapping; profiles/README.md describes its format")
    return found
