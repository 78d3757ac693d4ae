"""Does storing pay? A store may hold up its step; it repays when KV was lost and is loaded.

    cost      new tokens * seconds that a token's store holds the step up
    repaid    tokens that a returning turn no longer found on the GPU * (computing them - loading them)

Both are sums that fade, so the answer follows the load. While nothing is lost nothing is repaid. What is
lost must repay more than the cost: storing also lets admission start more programs, and where it barely
paid it cost up to 7 % (experiments/LOG.md, 2026-11-21).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from continuum_lmcache.reload.cost_model import CostModel

SETTLING_S = 120.0
MIN_PAYBACK = 1.25  # times its cost: not all that the GPU lost would have been found in a tier
ALWAYS_BELOW = 0.02  # of the time to compute the same tokens: a store cheaper than this is never stopped
TYPICAL_TOKENS = 10_000  # at which computing and loading are compared
LEAST_TRANSFERS = 8  # measured ones, before which the link's rate stands in


@dataclass(slots=True)
class StoreGate:
    """Learns from every turn and every store; answers whether to go on. Times in seconds."""

    stalls: bool  # whether steps wait for stores, which only this engine reads
    new_tokens: float = 0.0
    lost_tokens: float = 0.0
    _at_s: float = 0.0

    def turn(self, now_s: float, new_tokens: int, lost_tokens: int) -> None:
        """A turn started: it computes so many tokens, and had lost so many from the GPU."""
        left = math.exp(-max(0.0, now_s - self._at_s) / SETTLING_S)
        self.new_tokens = self.new_tokens * left + new_tokens
        self.lost_tokens = self.lost_tokens * left + lost_tokens
        self._at_s = now_s

    def wanted(self, costs: CostModel) -> bool:
        """Whether what is computed now should be stored."""
        if not self.stalls:
            return True
        store_s = store_token_s(costs)
        compute_s = costs.prefill_s(TYPICAL_TOKENS) / TYPICAL_TOKENS
        if store_s < ALWAYS_BELOW * compute_s:
            return True
        load_s = costs.dram.seconds(TYPICAL_TOKENS * costs.kv_bytes_per_token) / TYPICAL_TOKENS
        return self.lost_tokens * max(0.0, compute_s - load_s) > MIN_PAYBACK * self.new_tokens * store_s


def store_token_s(costs: CostModel) -> float:
    """For how long a token's store holds a step up: as measured, or by the rate of the way back."""
    rate = costs.store if costs.store.samples >= LEAST_TRANSFERS else costs.dram
    return rate.seconds(TYPICAL_TOKENS * costs.kv_bytes_per_token) / TYPICAL_TOKENS
