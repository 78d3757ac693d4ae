"""Each finding of the doctor, by a plan that has it and one that just has not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from continuum_lmcache.capacity import kv_budget
from continuum_lmcache.capacity.kv_budget import KVBudget
from continuum_lmcache.capacity.plan_check import DeploymentPlan, advice
from continuum_lmcache.console.known_models import by_name
from continuum_lmcache.reload.cost_model import CostModel, PrefillCurve, TransferRate
from continuum_lmcache.telemetry.findings import Severity
from continuum_lmcache.types import Tier

SHAPE = by_name("Llama-3.1-8B")
COSTS = CostModel(
    PrefillCurve(0, 1e-4, 0, 9), TransferRate(25e9, 0, 9), TransferRate(5e9, 0, 9), 131_072, 256
)
SLOW = TransferRate(1e9, 0, 9)  # 131 us a token where computing takes 100
PLAN = DeploymentPlan(
    SHAPE,
    kv_budget.of_bytes(SHAPE, 160_000 * 131_072, 16),
    COSTS,
    {Tier.DRAM: 400_000, Tier.SSD: 800_000},
    40_000,
)


def blocks(number: int) -> KVBudget:
    return kv_budget.of_bytes(SHAPE, number * 16 * 131_072, 16)


def test_a_sound_plan_is_not_objected_to() -> None:
    assert advice(PLAN) == []
    assert (PLAN.programs_in(200_000), PLAN.programs_in(199_999)) == (5, 4)


@pytest.mark.parametrize(
    ("change", "name", "severity"),
    [
        ({"budget": blocks(0)}, "no-kv-cache", Severity.ERROR),
        ({"budget": blocks(2_499)}, "context-exceeds-kv-cache", Severity.ERROR),
        ({"shape": replace(SHAPE, window_tokens=39_999)}, "context-exceeds-window", Severity.WARNING),
        ({"shape": replace(SHAPE, windowed_layers=16)}, "layers-of-several-kinds", Severity.NOTE),
        ({"tiers": {Tier.DRAM: 159_999}}, "tiers-smaller-than-gpu", Severity.NOTE),
        ({"ranks": 3}, "heads-not-divisible", Severity.ERROR),
        ({"ranks": 64}, "heads-not-divisible", Severity.ERROR),
        ({"budget": blocks(2_499), "is_assumed": True}, "context-exceeds-kv-cache", Severity.WARNING),
        ({"tiers": {}, "programs": 5}, "memory-is-short", Severity.NOTE),
        ({"programs": 21}, "memory-is-short", Severity.NOTE),
        ({"costs": replace(COSTS, ssd=SLOW)}, "ssd-slower-than-recompute", Severity.WARNING),
        ({"costs": replace(COSTS, ssd=replace(SLOW, samples=0))}, "ssd-slower-than-recompute", Severity.NOTE),
        ({"costs": replace(COSTS, ssd=TransferRate(5e9, 0, 0))}, "not-measured", Severity.NOTE),
        ({"costs": None}, "no-profile", Severity.NOTE),
    ],
)
def test_each_objection_has_a_plan_that_earns_it(change: Any, name: str, severity: Severity) -> None:
    found = {finding.name: finding.severity for finding in advice(replace(PLAN, **change))}
    assert found.get(name) is severity, found


@pytest.mark.parametrize(
    "change",
    [
        {"budget": blocks(2_500)},
        {"shape": replace(SHAPE, window_tokens=40_000)},
        {"tiers": {Tier.DRAM: 160_000}},
        {"tiers": {}, "programs": 4},
        {"programs": 20},
        {"ranks": 32},  # each K and V head on four ranks
    ],
)
def test_at_the_limit_nothing_is_wrong(change: Any) -> None:
    assert advice(replace(PLAN, **change)) == []


def test_a_window_below_a_context_that_nobody_asked_for_is_no_objection() -> None:
    assert advice(replace(PLAN, shape=replace(SHAPE, window_tokens=39_999), is_assumed=True)) == []


def test_short_memory_is_said_with_what_stock_vllm_computes_again_and_the_dram_that_holds_all() -> None:
    """8 x 40,000 tokens in 160,000: half of each context; 39.1 GiB, at 0.8 of what LMCache fills 48.8."""
    (found,) = advice(replace(PLAN, tiers={}, programs=8))
    assert "stock vLLM computes up to 20,000 tokens again at a turn" in found.evidence
    assert "49 GB behind LMCache (LMCACHE_MAX_LOCAL_CPU_SIZE=49)" in found.remedy


def test_a_model_that_does_not_fit_is_said_with_the_ranks_that_would_do() -> None:
    (found,) = advice(replace(PLAN, budget=blocks(0), ranks_that_fit=4))
    assert "--tensor-parallel-size, 4 would do" in found.remedy
