"""Which of a prompt's tokens to load from the tiers: the values of that decision, and who asks for it.

A `TierStore` asks `LoadPolicy.tokens_to_load` and offers vLLM as many. The policy's `to_load` decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from continuum_lmcache.reload.cost_model import CostModel
from continuum_lmcache.reload.rate_calibration import CalibratedCosts
from continuum_lmcache.reload.tier_store import TierHit, load_all
from continuum_lmcache.types import Residency, TurnId

LEAST_SAMPLES = 3  # of each rate that a decision uses
TRIAL_SHARE = 0.02  # of the time that computing instead of loading takes


class LoadReason(Enum):
    """The decision for one prompt. These are metric labels."""

    LOAD = "load"
    PARTIAL = "partial"
    RECOMPUTE = "recompute"
    UNMEASURED = "unmeasured"  # loaded, since a rate that the decision uses is only assumed
    TRIAL = "trial"  # loaded although computing is predicted cheaper, to measure the tier again


@dataclass(frozen=True, slots=True)
class LoadChoice:
    decision: LoadReason
    tokens: int  # after the GPU's tokens
    chosen_s: float = 0.0  # predicted time that all turns wait for the chosen option
    excess_s: float = 0.0  # predicted time that loading everything costs beyond that


class LoadState(NamedTuple):
    costs: CostModel  # by the rates so far
    others: int  # turns that wait or run beside this one
    kv_tokens: int  # of the GPU's KV cache, which all share
    trial_budget_s: float  # that earlier prompts have saved up


ToLoad = Callable[[Residency, LoadState], LoadChoice]


def is_measured(costs: CostModel, where: Residency) -> bool:
    """Whether the prefill, and each tier with a part of the prompt, has enough samples."""
    tiers = ((where.dram_tokens, costs.dram), (where.ssd_tokens, costs.ssd))
    rates = [costs.prefill.samples, *(rate.samples for tokens, rate in tiers if tokens)]
    return min(rates) >= LEAST_SAMPLES


def residency_of_offer(held: TierHit, gpu_tokens: int, found_tokens: int, total_tokens: int) -> Residency:
    """In which tier the connector's `found_tokens` after the GPU's `gpu_tokens` are, by the store's `held`.

    What the connector found beyond `held` was stored since then, so it is in DRAM.
    """
    end = gpu_tokens + found_tokens
    on_disk = max(0, min(held.tokens, end) - max(held.dram_tokens, gpu_tokens))
    return Residency(gpu_tokens, found_tokens - on_disk, on_disk, total_tokens)


class LoadPolicy:
    """Asks the policy for waiting turns, and counts the decisions of those that got their blocks.

    Each prompt that is computed adds TRIAL_SHARE of its time to the budget of trials, and a trial spends its
    predicted extra cost. Trials make such prompts about 2 % slower, and show when a tier is fast again.
    """

    def __init__(
        self, rates: CalibratedCosts, to_load: ToLoad | None, others: Callable[[], tuple[int, int]]
    ) -> None:
        """`to_load`: None loads everything. `others`: how many other turns there are, and the cache's
        tokens."""
        self.counts: Counter[str] = Counter()
        self.rates, self._to_load, self._others = rates, to_load, others
        self._unplaced: dict[TurnId, LoadChoice] = {}  # turns without blocks yet
        self.declined: set[TurnId] = set()  # turns of which a part was computed although a tier held it
        self._trial_budget_s = 0.0

    def tokens_to_load(self, turn: TurnId, where: Residency) -> int:
        """How many tokens to load (tier_store.LoadSelector)."""
        if self._to_load is None:
            return load_all(turn, where)
        choice = self._to_load(where, LoadState(self.rates.costs, *self._others(), self._trial_budget_s))
        self._unplaced[turn] = choice
        return choice.tokens

    def on_allocated(self, turn: TurnId) -> None:
        """vLLM allocated by the last answer: count it."""
        choice = self._unplaced.pop(turn, None)
        if choice is None:
            return
        self.counts[choice.decision.value] += 1
        if choice.decision in (LoadReason.PARTIAL, LoadReason.RECOMPUTE):
            self.declined.add(turn)
        if choice.decision is LoadReason.TRIAL:
            self._trial_budget_s -= choice.excess_s
        elif choice.excess_s:
            self._trial_budget_s += TRIAL_SHARE * choice.chosen_s

    def on_turn_end(self, turn: TurnId) -> None:
        """The turn ended, perhaps before it got blocks."""
        self._unplaced.pop(turn, None)
        self.declined.discard(turn)
