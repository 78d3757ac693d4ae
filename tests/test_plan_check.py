"""Each finding of the doctor, by a plan that has it and one that just has not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from continuum_lmcache.capacity import kv_budget
from continuum_lmcache.capacity.plan_check import DeploymentPlan, ExpectedLoad, advice, can_pins_pay
from continuum_lmcache.console.model_shapes import KNOWN
from continuum_lmcache.reload.cost_model import CostModel, PrefillCurve, TransferRate
from continuum_lmcache.telemetry.findings import Severity
from continuum_lmcache.types import Tier

SHAPE = KNOWN["llama-3.1-8b"]
COSTS = CostModel(
    PrefillCurve(0, 1e-4, 0, 9), TransferRate(25e9, 0, 9), TransferRate(5e9, 0, 9), 131_072, 256
)
SLOW = TransferRate(1e9, 0, 9)  # 131 us a token where computing takes 100
PLAN = DeploymentPlan(
    SHAPE,
    kv_budget.of_blocks(SHAPE, 10_000, 16),  # 160,000 tokens
    COSTS,
    ExpectedLoad("by hand", (40_000,), (0.5, 1.0)),
    {Tier.DRAM: 400_000, Tier.SSD: 800_000},
    profiled_bytes_per_token=131_072,
)


def names(plan: DeploymentPlan) -> set[str]:
    return {finding.name for finding in advice(plan)}


def test_a_sound_plan_is_not_objected_to() -> None:
    assert advice(PLAN) == []


@pytest.mark.parametrize(
    ("change", "name", "severity"),
    [
        ({"budget": kv_budget.of_blocks(SHAPE, 0, 16)}, "no-kv-cache", Severity.ERROR),
        ({"budget": kv_budget.of_blocks(SHAPE, 2_499, 16)}, "context-exceeds-kv-cache", Severity.ERROR),
        ({"budget": kv_budget.of_blocks(SHAPE, 2_500, 16)}, "one-program-at-a-time", Severity.WARNING),
        ({"shape": replace(SHAPE, window_tokens=39_999)}, "context-exceeds-window", Severity.WARNING),
        ({"tiers": {Tier.DRAM: 159_999}}, "dram-smaller-than-gpu", Severity.WARNING),
        ({"tiers": {Tier.DRAM: 400_000, Tier.SSD: 399_999}}, "ssd-smaller-than-dram", Severity.WARNING),
        ({"tiers": {Tier.DRAM: 45_000, Tier.SSD: 900_000}}, "dram-smaller-than-a-load", Severity.WARNING),
        ({"tiers": {}, "concurrent_programs": 5}, "no-tier", Severity.WARNING),
        ({"concurrent_programs": 21}, "tiers-smaller-than-programs", Severity.WARNING),
        ({"costs": replace(COSTS, ssd=SLOW)}, "ssd-slower-than-recompute", Severity.ERROR),
        ({"costs": replace(COSTS, dram=replace(COSTS.dram, fixed_s=4.0))}, "dram-slow", Severity.WARNING),
        ({"max_pinned_share": 0.24}, "no-room-for-pins", Severity.WARNING),
        ({"costs": replace(COSTS, ssd=TransferRate(5e9, 0, 0))}, "not-measured", Severity.NOTE),
        ({"profiled_bytes_per_token": 8192}, "profile-of-another-model", Severity.WARNING),
        ({"demand": ExpectedLoad("by hand", (40_000,))}, "no-tool-times", Severity.NOTE),
    ],
)
def test_each_objection_has_a_plan_that_earns_it(change: Any, name: str, severity: Severity) -> None:
    if name == "dram-slow":  # some loads pay: the mean context is shorter than the longest
        change |= {"demand": ExpectedLoad("by hand", (20_000, 60_000), (0.5,))}
    found = {finding.name: finding.severity for finding in advice(replace(PLAN, **change))}
    assert found.get(name) is severity, found


@pytest.mark.parametrize(
    "change",
    [
        {"budget": kv_budget.of_blocks(SHAPE, 5_000, 16)},
        {"shape": replace(SHAPE, window_tokens=40_000)},
        {"tiers": {Tier.DRAM: 160_000}},
        {"tiers": {}, "concurrent_programs": 4},
        {"concurrent_programs": 20},
        {"max_pinned_share": 0.25},
    ],
)
def test_at_the_limit_nothing_is_wrong(change: Any) -> None:
    assert names(replace(PLAN, **change)) == set()


def test_pins_cannot_pay_while_everything_fits() -> None:
    found = can_pins_pay(replace(PLAN, concurrent_programs=4))
    assert found.answer == "no" and "nothing is evicted" in found.why


def test_pins_cannot_pay_where_none_fits() -> None:
    assert can_pins_pay(replace(PLAN, max_pinned_share=0.2)).answer == "no"


def test_what_is_quickly_loaded_is_worth_a_pin_only_once_turns_queue() -> None:
    """40,000 tokens from DRAM: 0.21 s. Half of the tools take 0.5 s: 0.5 / 0.5 - 0.21 = 0.79 s of T."""
    found = can_pins_pay(replace(PLAN, concurrent_programs=8))
    assert found.answer == "under load" and "0.79 s" in found.why


def test_what_would_be_computed_again_is_worth_a_pin_at_once() -> None:
    found = can_pins_pay(replace(PLAN, concurrent_programs=8, tiers={}))
    assert found.answer == "yes" and "a pin of 1 s gains 3 s a turn" in found.why


def test_a_pin_that_gains_next_to_nothing_is_hardly_worth_it() -> None:
    """4 s to compute again; one tool in a hundred ends within a second, the others take minutes."""
    gaps_s = (0.039, *[250.0] * 99)
    found = can_pins_pay(replace(PLAN, tiers={}, demand=ExpectedLoad("by hand", (40_000,), gaps_s)))
    assert found.answer == "hardly"


def test_a_tier_that_holds_the_programs_is_where_they_come_back_from() -> None:
    assert replace(PLAN, concurrent_programs=10).reload_tier is Tier.DRAM
    assert replace(PLAN, concurrent_programs=11).reload_tier is Tier.SSD
    assert replace(PLAN, concurrent_programs=21).reload_tier is Tier.NONE
