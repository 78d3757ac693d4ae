"""Checks a plan by its own numbers, before a server is started. Each finding names what to do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from continuum_lmcache.capacity.kv_budget import GIB, KVBudget
from continuum_lmcache.reload.cost_model import CostModel
from continuum_lmcache.reload.model_shapes import ModelShape
from continuum_lmcache.telemetry.findings import Finding, error, note, warning
from continuum_lmcache.types import Tier

SIZES = {  # of the server that vLLM starts, and of one that runs already
    Tier.DRAM: "LMCACHE_MAX_LOCAL_CPU_SIZE (or --l1-size-gb of a server of your own)",
    Tier.SSD: "LMCACHE_MAX_LOCAL_DISK_SIZE (or max_capacity_gb of its --l2-adapter)",
}
WATERMARK = 0.8  # share of its DRAM that LMCache fills by default
MEASURE = "run `continuum-lmcache measure` on the machine that will serve; give its file by --profile"


@dataclass(frozen=True, slots=True)
class DeploymentPlan:
    """The model, the machine and the programs. Tokens and bytes are of one rank."""

    shape: ModelShape
    budget: KVBudget
    costs: CostModel | None  # of this model: its KV bytes are the budget's. None: not known
    tiers: Mapping[Tier, int]  # tokens that DRAM and SSD hold
    context_tokens: int  # of a program, at its end
    is_assumed: bool = False  # nobody asked for this context: no finding follows from its length
    programs: int | None = None  # alive at the same time; None: not given
    ranks: int = 1
    ranks_that_fit: int | None = None  # the fewest whose memory would hold the weights; None: not known

    @property
    def is_short(self) -> bool:
        """Whether neither the GPU nor a tier holds all programs."""
        return (self.programs or 0) * self.context_tokens > max(self.budget.tokens, *self.tiers.values(), 0)

    def programs_in(self, tokens: int) -> int:
        """How many fit into `tokens` of KV; each takes something besides its context."""
        return tokens // (self.context_tokens + self.budget.program_tokens)


def advice(plan: DeploymentPlan) -> list[Finding]:
    rules = (_tiers, _memory, _costs)
    return [finding for rule in rules for finding in rule(plan)]


def _memory(plan: DeploymentPlan) -> Iterator[Finding]:
    largest, heads = 0 if plan.is_assumed else plan.context_tokens, plan.shape.kv_heads
    if plan.shape.query_heads % plan.ranks or (heads % plan.ranks and plan.ranks % heads):
        yield error(
            "heads-not-divisible",
            f"{plan.shape.query_heads} heads, {heads} of K and V, cannot be shared by {plan.ranks} ranks",
            "vLLM refuses it: choose a --tensor-parallel-size that divides them",
        )
    if plan.budget.blocks == 0:
        more = f", {plan.ranks_that_fit} would do" if plan.ranks_that_fit else ""
        yield error(
            "no-kv-cache",
            "not one block of KV fits beside the weights",
            f"use a larger device, more ranks (--tensor-parallel-size{more}) or smaller weights (quantized: "
            "the config.json of such a checkpoint, or --weights-gib)",
        )
    elif plan.programs_in(plan.budget.tokens) == 0:
        found, assumed = (warning, " (assumed)") if plan.is_assumed else (error, "")
        yield found(
            "context-exceeds-kv-cache",
            f"a context has {plan.context_tokens:,} tokens{assumed} and the KV cache {plan.budget.tokens:,}",
            "such a program can never run: shorten contexts (--context), or give the KV cache more memory",
        )
    if largest > plan.shape.window_tokens:
        yield warning(
            "context-exceeds-window",
            f"a context has {largest:,} tokens and the model's window {plan.shape.window_tokens:,}",
            "vLLM will refuse those turns: compact the history, or raise --max-model-len if the model allows",
        )
    if others := plan.shape.windowed_layers + plan.shape.state_layers:
        unknown = plan.shape.state_layers and not plan.shape.state_bytes
        yield note(
            "layers-of-several-kinds",
            f"{others} of {plan.shape.layers + others} layers keep a window or a state: "
            f"{plan.budget.program_tokens:,} tokens a program{', without the states' if unknown else ''}",
            "compare with the size of the KV cache that vLLM logs at its start",
        )


def _tiers(plan: DeploymentPlan) -> Iterator[Finding]:
    if plan.programs and plan.is_short and plan.budget.blocks:
        tokens = plan.programs * plan.context_tokens
        held = "".join(f", {tier.value} {size:,}" for tier, size in plan.tiers.items())
        again = (tokens - max(plan.budget.tokens, *plan.tiers.values(), 0)) // plan.programs
        gib = tokens * plan.budget.bytes_per_token / GIB / WATERMARK
        yield note(
            "memory-is-short",
            f"{plan.programs} programs need {tokens:,} tokens; the GPU holds {plan.budget.tokens:,}{held}: "
            f"stock vLLM computes up to {again:,} tokens again at a turn",
            f"continuum helps; DRAM that holds all helps more: {gib * plan.ranks:,.0f} GB behind LMCache "
            f"(LMCACHE_MAX_LOCAL_CPU_SIZE={math.ceil(gib)}), or a disk (docs/lmcache.md)",
        )
    small = [tier for tier, size in plan.tiers.items() if size < plan.budget.tokens]
    if small:
        held = " and ".join(f"{tier.value} {plan.tiers[tier]:,}" for tier in small)
        yield note(
            "tiers-smaller-than-gpu",
            f"the GPU holds {plan.budget.tokens:,} tokens, {held}",
            "everything is written through, so a tier below the GPU's size holds little that the GPU has "
            f"lost: raise {' and '.join(SIZES[tier] for tier in small)}",
        )


def _costs(plan: DeploymentPlan) -> Iterator[Finding]:
    if plan.costs is None:
        yield note("no-profile", "how long computing and loading take is not known", MEASURE)
        return
    longest = min(plan.context_tokens, plan.shape.window_tokens)
    for tier in plan.tiers:
        if break_even_tokens(plan.costs, tier) > longest:
            found = warning if plan.costs.measured else note  # a guess is no reason to change anything
            yield found(
                f"{tier.value}-slower-than-recompute",
                f"loading {longest:,} tokens from {tier.value} takes longer than computing them",
                f"leave the {tier.value} tier out, or make it faster",
            )
    if not plan.costs.measured:
        yield note("not-measured", "at least one of the costs is from a data sheet", MEASURE)


def load_cost(costs: CostModel, tier: Tier) -> tuple[float, float]:
    """Seconds of a load from `tier`, once and for each token; one from disk passes through DRAM."""
    rates = (costs.dram,) if tier is Tier.DRAM else (costs.dram, costs.ssd)
    per_token_s = sum(costs.kv_bytes_per_token / rate.bytes_per_s for rate in rates)
    return sum(rate.fixed_s for rate in rates), per_token_s


def break_even_tokens(costs: CostModel, tier: Tier) -> float:
    """The least context such that loading it, and every longer one, is no slower than computing it.

    The largest root of prefill - load = (f - a) + (p - b) n + q n^2 / 2, in tokens; 0 where loading
    always pays, infinite where computing is faster for all long contexts. That LMCache loads only whole
    chunks is left out.
    """
    (fixed_s, per_token_s), prefill = load_cost(costs, tier), costs.prefill
    ahead_s = prefill.fixed_s - fixed_s
    slope_s, bend_s = prefill.per_token_s - per_token_s, prefill.per_pair_s
    if bend_s == 0:
        if slope_s < 0 or (slope_s == 0 and ahead_s < 0):
            return math.inf
        return max(0.0, -ahead_s / slope_s) if slope_s else 0.0
    inside = slope_s * slope_s - 2 * bend_s * ahead_s
    return 0.0 if inside < 0 else max(0.0, (math.sqrt(inside) - slope_s) / bend_s)
