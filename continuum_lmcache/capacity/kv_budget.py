"""How much KV fits, step by step: from a model's shape and a device's memory to blocks and programs.

    bytes per token = layers with full attention x values per layer x bytes per value
    KV cache        = memory x utilisation - weights - what a step needs     (or given)
    blocks          = KV cache / (block tokens x bytes per token)

All values are of one rank: with tensor parallelism each has its share of the heads and of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from continuum_lmcache.reload.model_shapes import ModelShape

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class BudgetLine:
    name: str
    how: str  # with the numbers in it
    value: float
    unit: str


@dataclass(frozen=True, slots=True)
class KVBudget:
    """One rank's KV cache."""

    steps: tuple[BudgetLine, ...]
    bytes_per_token: int
    block_tokens: int
    blocks: int
    program_tokens: int  # of each program, beside its context (ModelShape.program_tokens)

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_tokens


def of_memory(
    shape: ModelShape,
    device_bytes: float,
    utilisation: float,
    step_bytes: float,
    block_tokens: int,
    ranks: int = 1,
) -> KVBudget:
    """The budget that vLLM would compute. A KV cache below one block has 0 blocks.

    `utilisation`: vLLM's --gpu-memory-utilization, in (0, 1]. `step_bytes`: activations and graphs, which
    vLLM measures as it starts.
    """
    usable, weights = device_bytes * utilisation, shape.weight_bytes / ranks
    kv_bytes = usable - weights - step_bytes
    weights_from = shape.source + (f", over {ranks} ranks" if ranks > 1 else "")
    lines = (
        ("usable memory", f"{device_bytes / GIB:.1f} GiB x {utilisation:g}", usable),
        ("weights", weights_from, weights),
        ("a step's needs", "assumed; vLLM measures it at the start", step_bytes),
        ("KV cache", "usable memory - weights - a step's needs", kv_bytes),
    )
    return of_bytes(shape, kv_bytes, block_tokens, ranks, lines)


def of_bytes(
    shape: ModelShape,
    kv_bytes: float,
    block_tokens: int,
    ranks: int = 1,
    lines: Sequence[tuple[str, str, float]] = (),
) -> KVBudget:
    """The budget of a KV cache of this many bytes. `lines`: its arithmetic (name, how, bytes); (): given."""
    token_bytes = shape.bytes_per_token(ranks)
    blocks = max(0, int(kv_bytes // (block_tokens * token_bytes)))
    steps = (
        BudgetLine("KV of a token", token_formula(shape, ranks), token_bytes, "B"),
        *(
            BudgetLine(name, how, size / GIB, "GiB")
            for name, how, size in lines or [("KV cache", "as given", kv_bytes)]
        ),
        BudgetLine("blocks", f"KV cache / ({block_tokens} tokens x {token_bytes:,} B)", blocks, "blocks"),
        BudgetLine("tokens", f"{blocks:,} blocks x {block_tokens}", blocks * block_tokens, "tokens"),
    )
    return KVBudget(steps, token_bytes, block_tokens, blocks, shape.program_tokens(block_tokens, ranks))


def token_formula(shape: ModelShape, ranks: int) -> str:
    size, layers = f"{shape.kv_value_bytes} B", shape.bytes_per_token(ranks) // shape.layer_bytes(ranks)
    if shape.kv_heads == 0:
        return f"{layers} layers x {shape.head_size} latent values x {size}"
    heads = max(1, shape.kv_heads // ranks)
    return f"{layers} layers x {heads} KV heads x {shape.head_size} x 2 (K and V) x {size}"
