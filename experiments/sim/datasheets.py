"""Profiles of GPUs that nobody measured here, from their data sheets and assumed efficiencies.

    python -m experiments.sim.datasheets       write profiles/CARD-llama-3.1-8b.yaml

Rates and shares: continuum_lmcache/reload/cards.py; a decode reads the weights and the KV at a share of the
memory's rate. The KV pools of H100 and H200 are those of the same comparison; the others are assumed. Every
`samples` is 0: better than nothing, until somebody runs profiles/measure.py on such a card.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `python PATH` as well as -m

from continuum_lmcache.console.known_models import by_name
from continuum_lmcache.reload.cards import (
    CARDS,
    STEP_S,
    Card,
    assumed_costs,
)
from continuum_lmcache.reload.cost_model import CostModel
from profiles.timing import rounded

PROFILES = Path(__file__).resolve().parents[2] / "profiles"
MODEL = by_name("Llama-3.1-8B")
DISK_WRITE_BYTES_PER_S = 3e9  # assumed, of the same drive
KV_TOKENS = {"a100-80gb": 480_000, "h100": 434_000, "h200": 868_000, "b200": 1_168_000}


def derived(name: str, kv_tokens: int | None = None) -> dict[str, Any]:
    """The profile of a card for Llama 3.1 8B. `kv_tokens`: of a card that is not in KV_TOKENS."""
    card = CARDS[name]
    costs = assumed_costs(card, MODEL.active_parameters, MODEL.attended_values, MODEL.bytes_per_token())
    return {
        **sections(card, costs, MODEL.weight_bytes, kv_tokens or KV_TOKENS[name]),
        "provenance": {
            "measured": False,
            "device": name,
            "model": "Llama 3.1 8B, bf16",
            "source": card.sheet,
            "assumed": {
                "linear_share": card.linear_share,
                "attention_share": card.attention_share,
                "memory_share": card.memory_share,
                "step_s": STEP_S,
                "disk": "one NVMe drive, 5 GB/s read, 3 GB/s written",
            },
            "limits": "under about 200 tokens a prefill takes as long as reading the weights: only in step",
            "command": "python -m experiments.sim.datasheets",
        },
    }


def sections(card: Card, costs: CostModel, weight_bytes: float, kv_tokens: int) -> dict[str, Any]:
    """A profile without its provenance. `weight_bytes`: that a decode of one rank reads."""
    found = asdict(costs)
    for name in ("per_token_s", "per_pair_s"):
        found["prefill"][name] = rounded(found["prefill"][name])
    memory_bytes_per_s = card.memory_bytes_per_s * card.memory_share
    return {
        **found,
        "step": {
            "fixed_s": STEP_S,
            "per_sequence_s": 0.0,
            "per_token_s": found["prefill"]["per_token_s"],
            "least_linear_s": rounded(weight_bytes / memory_bytes_per_s),
            "half_rate_tokens": 0.0,
            "per_pair_s": found["prefill"]["per_pair_s"],
            "per_cached_token_s": rounded(costs.kv_bytes_per_token / memory_bytes_per_s),
            "samples": 0,
        },
        "dram_store": dict(found["dram"]),
        "ssd_store": found["ssd"] | {"bytes_per_s": DISK_WRITE_BYTES_PER_S},
        "kv_tokens": kv_tokens,
    }


def path_of(name: str) -> Path:
    return PROFILES / f"{name}-llama-3.1-8b.yaml"


def main() -> None:
    for name in KV_TOKENS:
        path_of(name).write_text(yaml.safe_dump(derived(name), sort_keys=False, width=110))
        typer.echo(path_of(name).name)


if __name__ == "__main__":
    typer.run(main)
