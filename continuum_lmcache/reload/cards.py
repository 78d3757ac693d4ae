"""Cards by their data sheets, and the costs of a model on one that nobody has measured.

Prefill compute is 2 FLOP per active parameter and token, and 4 per attended value for each pair of tokens,
at a share of the sheet's dense bf16 rate. The shares of H100 and H200 are those with which a simulated vLLM
comes within 7 % of the FCFS columns of github.com/hungchun0201/agentic-ai-survey; the others are assumed, as
are the links and the disk. The figures of cards other than A100-80GB, H100, H200 and B200 were not yet
compared with their sheets: a doctor's answer for them is a guess of a guess.
"""

from __future__ import annotations

from dataclasses import dataclass

from continuum_lmcache.reload.cost_model import CHUNK_TOKENS, CostModel, PrefillCurve, TransferRate

STEP_S = 0.004  # vLLM's own time per step, assumed; nearer to 0.0008 on one H200 (experiments/records/gpu.md)
COPY_FIXED_S = 0.001  # assumed
DISK_BYTES_PER_S = 5e9  # assumed: one NVMe drive on PCIe 4.0, which all ranks share
DISK_FIXED_S = 0.005  # assumed
PCIE4, PCIE5 = 25e9, 50e9  # of x16, one direction: 32 and 64 GB/s on the sheet, assumed as achieved


@dataclass(frozen=True, slots=True)
class Card:
    """A data sheet's figures, and the share of each that is assumed in practice."""

    device_mib: int  # what nvidia-smi or rocm-smi reports as the total, less than the sheet's round number
    dense_flop_per_s: float  # bf16 with float32 sums, without sparsity
    memory_bytes_per_s: float
    link_bytes_per_s: float  # host to device, one direction, as achieved
    sheet: str
    linear_share: float = 0.55
    attention_share: float = 0.45
    memory_share: float = 0.80


LINK5 = "PCIe 5.0 x16: 64 GB/s each way, 50 assumed"
NVIDIA = "https://www.nvidia.com/en-us/"
BLACKWELL = (
    "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
)
CARDS = {
    "a10": Card(23_028, 125e12, 0.60e12, PCIE4, NVIDIA + "data-center/products/a10-gpu/"),
    "a100-40gb": Card(40_960, 312e12, 1.555e12, PCIE4, NVIDIA + "data-center/a100/"),
    "a100-80gb": Card(
        *(81_920, 312e12, 2.04e12, PCIE4),
        "NVIDIA A100 80GB SXM data sheet: 312 TFLOP/s, 2.04 TB/s; PCIe 4.0 x16: 32 GB/s each way, 25 assumed",
    ),
    "l40s": Card(46_068, 362e12, 0.864e12, PCIE4, NVIDIA + "data-center/l40s/"),
    "rtx-5090": Card(32_607, 209.5e12, 1.792e12, PCIE5, BLACKWELL),
    "rtx-6000-ada": Card(49_140, 364.2e12, 0.96e12, PCIE4, NVIDIA + "design-visualization/rtx-6000/"),
    "rtx-pro-6000": Card(97_887, 503.8e12, 1.792e12, PCIE5, BLACKWELL),
    "h100": Card(
        *(81_559, 989e12, 3.35e12, PCIE5),
        "NVIDIA H100 SXM data sheet: 1979 TFLOP/s sparse, 3.35 TB/s; " + LINK5,
        *(0.70, 0.70),
    ),
    "h200": Card(
        *(143_771, 989e12, 4.80e12, PCIE5),
        "NVIDIA H200 SXM data sheet: 1979 TFLOP/s sparse, 4.8 TB/s; " + LINK5,
        *(0.70, 0.70),
    ),
    "b200": Card(
        *(183_359, 2250e12, 8.00e12, PCIE5),
        "NVIDIA HGX B200 data sheet: 4.5 PFLOP/s sparse, 8 TB/s; " + LINK5,
        *(0.45, 0.35, 0.75),
    ),
    "mi300x": Card(
        *(196_592, 1307e12, 5.30e12, PCIE5),
        "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html",
    ),
}


def assumed_costs(
    card: Card, parameters: float, attended_values: float, kv_bytes_per_token: int, ranks: int = 1
) -> CostModel:
    """Costs of a model on so many cards; every `samples` is 0. The costs of communication are left out.

    `parameters`: active for a token. `attended_values`: of one earlier token: layers x queries'
    heads x size of a head. `kv_bytes_per_token`: of one rank, whose link carries its share.
    """
    return CostModel(
        PrefillCurve(
            STEP_S,
            2 * parameters / card.dense_flop_per_s / card.linear_share / ranks,
            4 * attended_values / card.dense_flop_per_s / card.attention_share / ranks,
            samples=0,
        ),
        TransferRate(card.link_bytes_per_s, COPY_FIXED_S, samples=0),
        TransferRate(DISK_BYTES_PER_S / ranks, DISK_FIXED_S, samples=0),
        kv_bytes_per_token,
        CHUNK_TOKENS,
    )


def card_of(device: str) -> Card | None:
    """The card that a driver calls so: "NVIDIA H100 80GB HBM3", "NVIDIA RTX 6000 Ada Generation"."""
    words = set(device.lower().replace("-", " ").split())
    named = [name for name in CARDS if set(name.split("-")) <= words]
    return CARDS[max(named, key=len)] if named else None
