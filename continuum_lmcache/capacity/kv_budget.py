"""How much KV fits, step by step: from a model's shape and a device's memory to blocks and programs.

    bytes per token = layers with full attention x values per layer x bytes per value
    KV cache        = memory x utilisation - weights - what a step needs     (or given)
    blocks          = KV cache / (block tokens x bytes per token)

All values are of one rank: with tensor parallelism each has its share of the heads and of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from continuum_lmcache.errors import ConfigError
from continuum_lmcache.reload.model_shapes import ModelShape

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device's memory, as vLLM divides it."""

    device_bytes: float
    utilisation: float  # vLLM's --gpu-memory-utilization, in (0, 1]
    step_bytes: float  # activations and graphs; vLLM measures them as it starts


@dataclass(frozen=True, slots=True)
class BudgetLine:
    """One line of the arithmetic."""

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


def line_of_bytes(name: str, how: str, size_bytes: float) -> BudgetLine:
    return BudgetLine(name, how, size_bytes / GIB, "GiB")


def of_memory(shape: ModelShape, memory: DeviceMemory, block_tokens: int, ranks: int = 1) -> KVBudget:
    """The budget that vLLM would compute. A KV cache below one block has 0 blocks."""
    weights = shape.weight_bytes / ranks
    usable = memory.device_bytes * memory.utilisation
    kv_bytes = usable - weights - memory.step_bytes
    steps = (
        line_of_bytes("usable memory", f"{gib(memory.device_bytes)} x {memory.utilisation:g}", usable),
        line_of_bytes("weights", shape.source + (f", over {ranks} ranks" if ranks > 1 else ""), weights),
        line_of_bytes("a step's needs", "assumed; vLLM measures it at the start", memory.step_bytes),
        line_of_bytes("KV cache", "usable memory - weights - a step's needs", kv_bytes),
    )
    return of_bytes(shape, kv_bytes, block_tokens, ranks, steps)


def of_bytes(
    shape: ModelShape, kv_bytes: float, block_tokens: int, ranks: int = 1, before: Sequence[BudgetLine] = ()
) -> KVBudget:
    """The budget of a KV cache of this many bytes."""
    given = () if before else (line_of_bytes("KV cache", "as given", kv_bytes),)
    block_bytes = block_tokens * shape.bytes_per_token(ranks)
    blocks = max(0, int(kv_bytes // block_bytes))
    how = f"KV cache / ({block_tokens} tokens x {shape.bytes_per_token(ranks):,} B)"
    cut = BudgetLine("blocks", how, blocks, "blocks")
    return _finished(shape, ranks, block_tokens, blocks, (*before, *given, cut))


def _finished(
    shape: ModelShape, ranks: int, block_tokens: int, blocks: int, steps: Sequence[BudgetLine]
) -> KVBudget:
    per_token = BudgetLine("KV of a token", token_formula(shape, ranks), shape.bytes_per_token(ranks), "B")
    tokens = BudgetLine("tokens", f"{blocks:,} blocks x {block_tokens}", blocks * block_tokens, "tokens")
    own = shape.program_tokens(block_tokens, ranks)
    return KVBudget((per_token, *steps, tokens), shape.bytes_per_token(ranks), block_tokens, blocks, own)


def token_formula(shape: ModelShape, ranks: int) -> str:
    """The first line of the arithmetic."""
    size, layers = f"{shape.kv_value_bytes} B", shape.bytes_per_token(ranks) // shape.layer_bytes(ranks)
    if shape.kv_heads == 0:
        return f"{layers} layers x {shape.head_size} latent values x {size}"
    heads = max(1, shape.kv_heads // ranks)
    return f"{layers} layers x {heads} KV heads x {shape.head_size} x 2 (K and V) x {size}"


def programs_that_fit(tokens: float, contexts_tokens: Sequence[int], program_tokens: int = 0) -> int:
    """How many programs of the mean context fit into `tokens` of KV; each takes `program_tokens` besides.

    Raises ConfigError without a context.
    """
    if not contexts_tokens:
        raise ConfigError("no context is known, so the programs that fit cannot be counted")
    needed = sum(contexts_tokens) + len(contexts_tokens) * program_tokens
    return int(tokens * len(contexts_tokens) // needed)


def gib(size_bytes: float) -> str:
    return f"{size_bytes / GIB:.1f} GiB"
