"""Is there anything to gain? While all contexts fit the GPU nothing is evicted: vLLM's own order stands.

Contexts grow after their programs were let in, so it must end well before the cache is full: programs that
turns in vLLM's order have brought half-way together fill it together, and evict each other (LOG.md).
"""

from __future__ import annotations

from dataclasses import dataclass

CROWDED_SHARE = 0.5  # of the GPU's KV, by the contexts of everybody who is here
ROOMY_SHARE = 0.4  # less than the other: each change sorts the whole queue anew


@dataclass(slots=True)
class Guard:
    """Whether programs compete for memory. Shadow accounting: one number a step, no second scheduler."""

    gpu_tokens: int
    crowded: bool = False

    def looks(self, context_tokens: int, held: bool = False) -> bool:
        """Take in what everybody's contexts add up to, in tokens, and whether somebody is held at the door:
        for want of memory, to come. Whether the answer has changed."""
        share = ROOMY_SHARE if self.crowded else CROWDED_SHARE
        before, self.crowded = self.crowded, held or context_tokens > share * self.gpu_tokens
        return before != self.crowded
