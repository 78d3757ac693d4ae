"""Profiles of GPUs that nobody measured here, from their data sheets and assumed efficiencies.

    python -m profiles.datasheets          write profiles/CARD-llama-3.1-8b.yaml

Prefill compute is 2 FLOP per parameter and token, and 4 * layers * hidden size for each pair of tokens,
at a share of the data sheet's dense bf16 rate; a decode reads the weights and the KV at a share of the
memory's rate. The shares and KV pools of H100 and H200 are those with which a simulated vLLM comes within 7 %
of the FCFS columns of github.com/hungchun0201/agentic-ai-survey; the others are assumed, as are the links and
the disk. Every `samples` is 0: better than nothing, until
somebody runs profiles/measure.py on such a card.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python PATH` as well as -m

from profiles.timing import rounded

HERE = Path(__file__).resolve().parent
PARAMETERS = 8.03e9  # Llama 3.1 8B, model card
LAYERS, HIDDEN, KV_HEADS, HEAD_SIZE = 32, 4096, 8, 128  # its config.json
VALUE_BYTES = 2  # bf16
STEP_S = 0.004  # vLLM's own time per step, assumed; nearer to 0.0008 on one H200 (experiments/records/gpu.md)
COPY_FIXED_S = 0.001  # assumed
DISK_BYTES_PER_S = 5e9  # assumed: one NVMe drive on PCIe 4.0
DISK_WRITE_BYTES_PER_S = 3e9  # assumed, of the same drive
DISK_FIXED_S = 0.005  # assumed


@dataclass(frozen=True, slots=True)
class Card:
    """A data sheet's figures, and the share of each that is assumed in practice."""

    dense_flop_per_s: float  # bf16, without sparsity
    linear_share: float
    attention_share: float
    memory_bytes_per_s: float
    memory_share: float
    kv_tokens: int  # memory of the card that is left for KV: assumed, but h100 and h200 (see above)
    link_bytes_per_s: float  # host to device, one direction, as achieved
    sheet: str


PCIE4 = "PCIe 4.0 x16: 32 GB/s each way, 25 assumed"
PCIE5 = "PCIe 5.0 x16: 64 GB/s each way, 50 assumed"
CARDS = {
    "a100-80gb": Card(
        *(312e12, 0.55, 0.45, 2.04e12, 0.80, 480_000, 25e9),
        f"NVIDIA A100 80GB SXM data sheet: 312 TFLOP/s, 2.04 TB/s; {PCIE4}",
    ),
    "h100": Card(
        *(989e12, 0.70, 0.70, 3.35e12, 0.80, 434_000, 50e9),
        f"NVIDIA H100 SXM data sheet: 1979 TFLOP/s sparse, 3.35 TB/s; {PCIE5}",
    ),
    "h200": Card(
        *(989e12, 0.70, 0.70, 4.80e12, 0.80, 868_000, 50e9),
        f"NVIDIA H200 SXM data sheet: 1979 TFLOP/s sparse, 4.8 TB/s; {PCIE5}",
    ),
    "b200": Card(
        *(2250e12, 0.45, 0.35, 8.00e12, 0.75, 1_168_000, 50e9),
        f"NVIDIA HGX B200 data sheet: 4.5 PFLOP/s sparse, 8 TB/s; {PCIE5}",
    ),
}


def derived(name: str) -> dict[str, Any]:
    """The profile of a card in CARDS for Llama 3.1 8B."""
    card = CARDS[name]
    compute = {
        "per_token_s": rounded(2 * PARAMETERS / card.dense_flop_per_s / card.linear_share),
        "per_pair_s": rounded(4 * LAYERS * HIDDEN / card.dense_flop_per_s / card.attention_share),
    }
    kv_bytes_per_token = 2 * LAYERS * KV_HEADS * HEAD_SIZE * VALUE_BYTES
    memory_bytes_per_s = card.memory_bytes_per_s * card.memory_share
    copy = {"bytes_per_s": card.link_bytes_per_s, "fixed_s": COPY_FIXED_S, "samples": 0}
    disk = {"fixed_s": DISK_FIXED_S, "samples": 0}
    return {
        "prefill": {"fixed_s": STEP_S, **compute, "samples": 0},
        "dram": copy,
        "ssd": {"bytes_per_s": DISK_BYTES_PER_S, **disk},
        "kv_bytes_per_token": kv_bytes_per_token,
        "chunk_tokens": 256,
        "step": {
            "fixed_s": STEP_S,
            "per_sequence_s": 0.0,
            "per_token_s": compute["per_token_s"],
            "least_linear_s": rounded(VALUE_BYTES * PARAMETERS / memory_bytes_per_s),
            "half_rate_tokens": 0.0,
            "per_pair_s": compute["per_pair_s"],
            "per_cached_token_s": rounded(kv_bytes_per_token / memory_bytes_per_s),
            "samples": 0,
        },
        "dram_store": dict(copy),
        "ssd_store": {"bytes_per_s": DISK_WRITE_BYTES_PER_S, **disk},
        "kv_tokens": card.kv_tokens,
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
