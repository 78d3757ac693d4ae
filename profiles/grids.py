"""What is measured where: sizes that a machine of its kind meets, and finishes in time."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True, slots=True)
class Grid:
    """Tokens, sequences, and chunks of KV."""

    prefill_tokens: tuple[int, ...]
    prefill_contexts: tuple[int, ...]  # multiples of the block
    step_chunks: tuple[int, ...]  # 0: decode only
    step_contexts: tuple[int, ...]  # multiples of the block
    step_batches: tuple[int, ...]  # sequences that decode in the same step
    load_chunks: tuple[int, ...]
    repetitions: int
    budget_s: float  # for all of it, the engine's start not counted

    @property
    def prefills(self) -> list[tuple[int, int]]:
        return list(product(self.prefill_tokens, self.prefill_contexts))

    @property
    def largest_chunk(self) -> int:
        return max(self.step_chunks)

    @property
    def longest_tokens(self) -> int:
        """The longest sequence, with room for what the decoding ones generate."""
        prefill = max(self.prefill_tokens) + max(self.prefill_contexts)
        return max(prefill, max(self.step_contexts) + self.largest_chunk) + 1024


QUICK = Grid((128, 256, 512), (0, 512), (0, 128, 512), (256,), (1, 4), (1, 4, 16), 2, 45.0)
CPU = Grid(
    prefill_tokens=(128, 256, 512, 1024, 2048),
    prefill_contexts=(0, 1024, 4096),
    step_chunks=(0, 128, 256, 512, 1024, 2048),
    step_contexts=(256, 2048),
    step_batches=(1, 4),
    load_chunks=(1, 2, 4, 8, 16, 32),
    repetitions=5,
    budget_s=480.0,
)
GPU = Grid(
    prefill_tokens=(128, 512, 1024, 2048, 4096, 8192, 16384, 32768),
    prefill_contexts=(0, 8192, 32768, 65536),
    step_chunks=(0, 128, 256, 512, 1024, 2048, 4096, 8192),
    step_contexts=(1024, 8192, 32768),
    step_batches=(1, 8, 32),
    load_chunks=(1, 2, 4, 8, 16, 32, 64),
    repetitions=5,
    budget_s=420.0,
)
GPU_QUICK = Grid(
    prefill_tokens=(128, 512, 2048, 8192),
    prefill_contexts=(0, 4096, 16384),
    step_chunks=(0, 128, 512, 2048, 8192),
    step_contexts=(1024, 8192),
    step_batches=(1, 8, 32),
    load_chunks=(1, 4, 16, 32),
    repetitions=3,
    budget_s=60.0,
)
