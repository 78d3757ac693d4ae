"""Profiles of GPUs that nobody measured here, from their data sheets and assumed efficiencies.

    python -m profiles.datasheets          write profiles/CARD-llama-3.1-8b.yaml

Prefill compute is 2 FLOP per parameter and token, and 4 * layers * hidden size for each pair of tokens,
at a share of the data sheet's dense bf16 rate. The share of H100 and H200 is the one with which a simulated
vLLM comes within 7 % of the FCFS columns of github.com/hungchun0201/agentic-ai-survey; the others are
assumed, as are the links and the disk. Every `samples` is 0: better than nothing, until
somebody runs profiles/measure.py on such a card.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
import yaml

from profiles.timing import rounded

HERE = Path(__file__).resolve().parent
PARAMETERS = 8.03e9  # Llama 3.1 8B, model card
LAYERS, HIDDEN, KV_HEADS, HEAD_SIZE = 32, 4096, 8, 128  # its config.json
STEP_S = 0.004  # vLLM's own time per step, assumed
COPY_FIXED_S = 0.001  # assumed
DISK_BYTES_PER_S = 5e9  # assumed: one NVMe drive on PCIe 4.0
DISK_FIXED_S = 0.005  # assumed


@dataclass(frozen=True, slots=True)
class Card:
    """What a data sheet says, and which share of it is taken for real."""

    dense_flop_per_s: float  # bf16, without sparsity
    linear_share: float
    attention_share: float
    link_bytes_per_s: float  # host to device, one direction, as it is reached
    sheet: str


PCIE4 = "PCIe 4.0 x16: 32 GB/s each way, 25 assumed"
PCIE5 = "PCIe 5.0 x16: 64 GB/s each way, 50 assumed"
CARDS = {
    "a100-80gb": Card(312e12, 0.55, 0.45, 25e9, f"NVIDIA A100 80GB SXM data sheet: 312 TFLOP/s; {PCIE4}"),
    "h100": Card(989e12, 0.70, 0.70, 50e9, f"NVIDIA H100 SXM data sheet: 1979 TFLOP/s sparse; {PCIE5}"),
    "h200": Card(989e12, 0.70, 0.70, 50e9, f"NVIDIA H200 SXM data sheet: 1979 TFLOP/s sparse; {PCIE5}"),
    "b200": Card(2250e12, 0.45, 0.35, 50e9, f"NVIDIA HGX B200 data sheet: 4.5 PFLOP/s sparse; {PCIE5}"),
}


def derived(name: str) -> dict[str, Any]:
    """The profile of a card in CARDS for Llama 3.1 8B."""
    card = CARDS[name]
    return {
        "prefill": {
            "fixed_s": STEP_S,
            "per_token_s": rounded(2 * PARAMETERS / card.dense_flop_per_s / card.linear_share),
            "per_pair_s": rounded(4 * LAYERS * HIDDEN / card.dense_flop_per_s / card.attention_share),
            "samples": 0,
        },
        "dram": {"bytes_per_s": card.link_bytes_per_s, "fixed_s": COPY_FIXED_S, "samples": 0},
        "ssd": {"bytes_per_s": DISK_BYTES_PER_S, "fixed_s": DISK_FIXED_S, "samples": 0},
        "kv_bytes_per_token": 2 * LAYERS * KV_HEADS * HEAD_SIZE * 2,
        "chunk_tokens": 256,
        "provenance": {
            "measured": False,
            "device": name,
            "model": "Llama 3.1 8B, bf16",
            "source": card.sheet,
            "assumed": {
                "linear_share": card.linear_share,
                "attention_share": card.attention_share,
                "step_s": STEP_S,
                "disk": "one NVMe drive, 5 GB/s",
            },
            "limits": "under about 200 tokens a prefill takes as long as reading the weights: not in here",
            "command": "python -m profiles.datasheets",
        },
    }


def path_of(name: str) -> Path:
    return HERE / f"{name}-llama-3.1-8b.yaml"


def main() -> None:
    """Write every card's profile."""
    for name in CARDS:
        path_of(name).write_text(yaml.safe_dump(derived(name), sort_keys=False, width=110))
        typer.echo(path_of(name).name)


if __name__ == "__main__":
    typer.run(main)
