"""Checks a plan by its own numbers, before a server is started."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean

from continuum_lmcache.capacity.break_even import PinValue, break_even_tokens, pin_values
from continuum_lmcache.capacity.kv_budget import KVBudget, ModelShape, programs_that_fit
from continuum_lmcache.reload.cost_model import CostModel
from continuum_lmcache.telemetry.findings import Finding, error, note, warning
from continuum_lmcache.types import Tier

LOAD_SHARE = 7 / 8  # of the DRAM pool for one load (connectors/lmcache/known_issues.py)
CLEAR_GAIN_SHARE = 0.05  # of the reload that a pin would save; with less the answer is "hardly"
SIZES = {Tier.DRAM: "lmcache.max_local_cpu_size", Tier.SSD: "lmcache.max_local_disk_size"}
MEASURE = "measure with profiles/measure.py on the machine that will serve"


@dataclass(frozen=True, slots=True)
class ExpectedLoad:
    """The programs to be served."""

    source: str
    contexts_tokens: tuple[int, ...]  # the longest context of each program; not empty
    gaps_s: tuple[float, ...] = ()  # durations of tools; empty: not known

    @property
    def mean_tokens(self) -> int:
        return round(fmean(self.contexts_tokens))


@dataclass(frozen=True, slots=True)
class DeploymentPlan:
    """The model, the machine and the programs. Tokens and bytes are of one rank."""

    shape: ModelShape
    budget: KVBudget
    costs: CostModel  # of this model: its KV bytes are the budget's
    demand: ExpectedLoad
    tiers: Mapping[Tier, int]  # tokens that DRAM and SSD hold
    concurrent_programs: int | None = None  # programs alive at the same time; None: not given
    max_pinned_share: float = 0.8
    max_ttl_s: float = 300.0
    profiled_bytes_per_token: int | None = None  # of the profile's model; None: no profile

    @property
    def fits(self) -> int:
        """Programs of the mean context in the GPU's KV cache."""
        return programs_that_fit(self.budget.tokens, self.demand.contexts_tokens)

    @property
    def reload_tier(self) -> Tier:
        """Where KV that the GPU lost is found: the first tier that holds all programs.

        Without `concurrent_programs`, the first that holds more than the GPU does.
        """
        needed = (self.concurrent_programs or 0) * self.demand.mean_tokens or self.budget.tokens
        return next((tier for tier in (Tier.DRAM, Tier.SSD) if self.tiers.get(tier, 0) >= needed), Tier.NONE)


def advice(plan: DeploymentPlan) -> list[Finding]:
    """All problems that the numbers show."""
    rules = (_memory, _contexts, _sizes, _speeds, _pins_fit, _sources)
    return [finding for rule in rules for finding in rule(plan)]


def _memory(plan: DeploymentPlan) -> Iterator[Finding]:
    largest = max(plan.demand.contexts_tokens)
    if plan.budget.blocks == 0:
        yield error(
            "no-kv-cache",
            "not one block of KV fits beside the weights",
            "use a larger device, more ranks (--tensor-parallel-size) or smaller weights (quantization)",
        )
    elif largest > plan.budget.tokens:
        yield error(
            "context-exceeds-kv-cache",
            f"the longest context has {largest:,} tokens and the KV cache {plan.budget.tokens:,}",
            "such a program can never run: shorten contexts, or give the KV cache more memory",
        )
    elif plan.fits < 2:
        yield warning(
            "one-program-at-a-time",
            f"{plan.demand.mean_tokens:,} tokens a program, and the KV cache holds {plan.budget.tokens:,}",
            "programs run one after the other: give the KV cache more memory (or --kv-cache-dtype fp8)",
        )


def _contexts(plan: DeploymentPlan) -> Iterator[Finding]:
    over = sum(tokens > plan.shape.window_tokens for tokens in plan.demand.contexts_tokens)
    if over:
        yield warning(
            "context-exceeds-window",
            f"{over} of {len(plan.demand.contexts_tokens)} programs need more than the model's "
            f"{plan.shape.window_tokens:,} tokens",
            "vLLM will refuse those turns: compact the history, or raise --max-model-len if the model allows",
        )


def _sizes(plan: DeploymentPlan) -> Iterator[Finding]:
    dram, ssd = plan.tiers.get(Tier.DRAM, 0), plan.tiers.get(Tier.SSD, 0)
    largest = max(plan.demand.contexts_tokens)
    for tier, tokens in plan.tiers.items():
        if tokens < plan.budget.tokens:
            yield warning(
                f"{tier.value}-smaller-than-gpu",
                f"the {tier.value} tier holds {tokens:,} tokens, the GPU {plan.budget.tokens:,}",
                "everything is written through, so an LRU this small holds little that the GPU has lost: "
                f"raise {SIZES[tier]}, or leave the tier out",
            )
    if ssd and ssd < dram:
        yield warning(
            "ssd-smaller-than-dram",
            f"the ssd tier holds {ssd:,} tokens, DRAM {dram:,}",
            f"the disk holds little that DRAM has lost: raise {SIZES[Tier.SSD]}",
        )
    if ssd and dram * LOAD_SHARE < largest:
        yield warning(
            "dram-smaller-than-a-load",
            f"a load from disk passes through DRAM, whose pool takes {int(dram * LOAD_SHARE):,} tokens at "
            f"once; the longest context has {largest:,}",
            f"the rest is computed again (stock LMCache hangs instead): raise {SIZES[Tier.DRAM]}",
        )
    working_set = (plan.concurrent_programs or 0) * plan.demand.mean_tokens
    if plan.tiers and working_set > max(*plan.tiers.values(), plan.budget.tokens):
        yield warning(
            "tiers-smaller-than-programs",
            f"{plan.concurrent_programs} programs hold {working_set:,} tokens, the largest tier "
            f"{max(plan.tiers.values()):,}",
            "an LRU below the working set evicts KV before its program returns: raise "
            f"{SIZES[Tier.DRAM]} or {SIZES[Tier.SSD]}",
        )
    if plan.concurrent_programs and plan.concurrent_programs > plan.fits and not plan.tiers:
        yield warning(
            "no-tier",
            f"{plan.concurrent_programs} programs at once and room for {plan.fits}; "
            "what is evicted is computed again",
            f"give LMCache DRAM ({SIZES[Tier.DRAM]}): it gains more than any pin",
        )


def _speeds(plan: DeploymentPlan) -> Iterator[Finding]:
    longest = min(max(plan.demand.contexts_tokens), plan.shape.window_tokens)
    for tier in plan.tiers:
        tokens = break_even_tokens(plan.costs, tier)
        if tokens > longest:
            at = "at no context" if math.isinf(tokens) else f"from {tokens:,.0f} tokens on"
            yield error(
                f"{tier.value}-slower-than-recompute",
                f"loading from {tier.value} pays {at}; the longest context has {longest:,}",
                f"leave the {tier.value} tier out, or make it faster",
            )
        elif tokens > plan.demand.mean_tokens:
            yield warning(
                f"{tier.value}-slow",
                f"loading from {tier.value} pays from {tokens:,.0f} tokens on; the mean context has "
                f"{plan.demand.mean_tokens:,}",
                f"most loads from {tier.value} cost more than computing: make it faster",
            )


def _pins_fit(plan: DeploymentPlan) -> Iterator[Finding]:
    room = int(plan.budget.tokens * plan.max_pinned_share)
    if plan.budget.blocks and room < plan.demand.mean_tokens:
        yield warning(
            "no-room-for-pins",
            f"pins may hold {room:,} tokens ({plan.max_pinned_share:.0%} of the KV cache) and a program has "
            f"{plan.demand.mean_tokens:,}",
            "not one program can be pinned: raise continuum.max_pinned_share or the KV cache",
        )


def _sources(plan: DeploymentPlan) -> Iterator[Finding]:
    if not plan.costs.measured:
        yield note(
            "not-measured",
            "measured: false; at least one of the rates is from a data sheet or a guess",
            f"treat every time here as an assumption, and {MEASURE}",
        )
    made_for = plan.profiled_bytes_per_token
    if made_for is not None and made_for != plan.budget.bytes_per_token:
        yield warning(
            "profile-of-another-model",
            f"the profile is of a model with {made_for:,} B of KV a token; this one has "
            f"{plan.budget.bytes_per_token:,} B on a rank",
            f"loads are scaled to this model, but prefill times are not its own: {MEASURE}",
        )
    if not plan.demand.gaps_s:
        yield note(
            "no-tool-times",
            "the durations of the tools are not known; Exp(1) is assumed, as in the paper's cold start",
            "give a recording (--run); a running server learns them",
        )


@dataclass(frozen=True, slots=True)
class PinVerdict:
    """Whether pins can pay here, and why."""

    answer: str  # "yes", "hardly", "under load", "no"
    why: str
    by_tier: Mapping[Tier, PinValue]


def can_pins_pay(plan: DeploymentPlan) -> PinVerdict:
    """Pins pay where something is evicted, a pin fits, and eq. 2 has a maximum above 0."""
    by_tier = pin_values(plan.costs, plan.demand.mean_tokens, plan.demand.gaps_s, plan.max_ttl_s)
    tier = plan.reload_tier
    pin = by_tier[tier]
    if any(_pins_fit(plan)) or plan.budget.blocks == 0:
        return PinVerdict("no", "a program of the mean context does not fit into the pins' share", by_tier)
    if plan.concurrent_programs is not None and plan.concurrent_programs <= plan.fits:
        programs = f"all {plan.concurrent_programs} programs fit into the KV cache (room for {plan.fits})"
        why = f"{programs}: nothing is evicted"
        return PinVerdict("no", why, by_tier)
    begins = f"beyond {plan.fits} programs at once, where eviction begins"
    where = "is computed again" if tier is Tier.NONE else f"comes back from {tier.value}"
    saves = f"a context of {plan.demand.mean_tokens:,} tokens that was lost {where} in {pin.reload_s:.3g} s"
    if pin.least_delay_s <= 0:
        pays = f"a pin of {pin.best.ttl_s:.3g} s gains {pin.gain_s:.3g} s a turn on average"
        much = pin.gain_s >= CLEAR_GAIN_SHARE * pin.reload_s
        return PinVerdict("yes" if much else "hardly", f"{begins}: {saves}, and {pays}", by_tier)
    if math.isinf(pin.least_delay_s):
        return PinVerdict("no", f"no tool is back within continuum.max_ttl_s, {plan.max_ttl_s:g} s", by_tier)
    delay = f"only once turns that lost their KV queue for more than {pin.least_delay_s:.3g} s"
    return PinVerdict("under load", f"{begins}, and {delay}: {saves}", by_tier)
