"""Each rule of a running server's diagnosis: where it fires, where it just does not, and missing metrics."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from continuum_lmcache.telemetry.findings import Severity
from continuum_lmcache.telemetry.health_rules import RULES, ServerWindow, Thresholds, diagnose, not_evaluated

HEALTHY = ServerWindow(
    seconds=10,
    running_turns=20,
    waiting_turns=0,
    kv_usage=0.95,
    pinned_share=0.3,
    finished_turns=100,
    preemptions=5,
    queue_s=5.0,
    prefill_s=12.0,
    computed_tokens=10_000,
    programs=10,
    context_tokens=20_000,
    working_set_tokens=200_000,
    tier_capacity_tokens={"dram": 200_000, "ssd": 150_000},
    queried_tokens=100_000,
    loaded_tokens={"dram": 40_000, "ssd": 10_000},
    load_s={"dram": 1.0, "ssd": 1.0},
    store_s=0.5,
    load_decisions={"load": 5.0},
    rate_samples={"dram": 1},
    tier_store_up=1,
    lost_s={"nonce": 0.2, "tools": 0.2, "compaction": 9.0},
    lost_returns={"nonce": 3, "tools": 1, "compaction": 1},
    lost_at_token={"nonce": 41},
)
CASES: dict[str, Any] = {
    "low-batch-memory-full": {"running_turns": 7.9, "waiting_turns": 1},
    "preemptions": {"preemptions": 6},
    "queue-over-target": {"queue_s": 5.1},
    "tier-too-small": {"working_set_tokens": 200_001},
    "tier-misses": {"queried_tokens": 100_001},
    "reload-slower-than-recompute-ssd": {"load_s": {"dram": 0.0, "ssd": 6.1}},
    "store-stalls": {"store_s": 0.51},
    "tier-store-down": {"tier_store_up": 0},
    "guessed-rates": {"rate_samples": {"dram": 0}},
    "lost-to-nonce": {"lost_s": {"nonce": 0.21}},
    "lost-to-tools": {"lost_s": {"tools": 0.21}},
    "lost-to-salt": {"lost_s": {"salt": 0.21}},
    "lost-to-thoughts": {"lost_s": {"thoughts": 0.21}},
    "lost-to-answer": {"lost_s": {"answer": 0.21}},
}


def test_a_server_at_every_limit_is_well() -> None:
    assert diagnose(HEALTHY) == []
    assert not_evaluated(HEALTHY) == {}


@pytest.mark.parametrize("name", CASES)
def test_a_step_beyond_a_limit_is_found_alone_and_says_what_to_do(name: str) -> None:
    (found,) = diagnose(replace(HEALTHY, **CASES[name]))
    assert found.name == name
    assert any(letter.isdigit() for letter in found.evidence) or name in ("tier-store-down", "guessed-rates")
    assert len(found.remedy) > 20


def test_a_dead_tier_store_is_the_gravest() -> None:
    (found,) = diagnose(replace(HEALTHY, tier_store_up=0))
    assert found.severity is Severity.ERROR


def test_memory_full_of_pins_is_reported_as_such() -> None:
    (found,) = diagnose(replace(HEALTHY, running_turns=2, waiting_turns=9))
    assert "30% of it by pins" in found.evidence


def test_a_finding_on_prompts_says_where_the_latest_parted() -> None:
    (found,) = diagnose(replace(HEALTHY, lost_s={"nonce": 2.5}))
    assert "3 returns in 10 s need 2.50 s" in found.evidence and "at token 41" in found.evidence


def test_a_full_server_with_a_large_batch_or_an_empty_queue_is_only_busy() -> None:
    assert diagnose(replace(HEALTHY, running_turns=8, waiting_turns=9)) == []
    assert diagnose(replace(HEALTHY, running_turns=1, waiting_turns=0)) == []
    assert diagnose(replace(HEALTHY, running_turns=1, waiting_turns=9, kv_usage=0.89)) == []


def test_targets_are_the_users() -> None:
    assert [f.name for f in diagnose(HEALTHY, Thresholds(queue_s=4.9))] == ["queue-over-target"]


def test_a_server_that_reports_nothing_is_not_judged() -> None:
    silent = ServerWindow(seconds=5)
    assert diagnose(silent) == []
    assert not_evaluated(silent).keys() == RULES.keys()


@given(st.data())
def test_any_part_of_a_window_can_be_missing(data: st.DataObject) -> None:
    """With any metrics missing, each rule is applied or listed as not evaluated."""
    empty = ServerWindow(seconds=10)
    gone = data.draw(st.sets(st.sampled_from([f.name for f in fields(ServerWindow) if f.name != "seconds"])))
    bad = {k: v for case in CASES.values() for k, v in case.items()}
    seen = replace(replace(HEALTHY, **bad), **{name: getattr(empty, name) for name in gone})
    found = {finding.name for finding in diagnose(seen)}
    missing = not_evaluated(seen)
    assert ("queue over its target" in missing) == ("queue_s" in gone) == ("queue-over-target" not in found)
    assert ("tier store up" in missing) == ("tier-store-down" not in found)


def test_a_tier_is_slow_only_beyond_what_computing_takes() -> None:
    """10 s for 10,000 tokens computed: 1,000 us a token; ssd's 10,000 tokens in 10 s are as fast."""
    even = replace(HEALTHY, prefill_s=20.0, load_s={"dram": 0.0, "ssd": 10.0})
    assert diagnose(even) == []
    assert len(diagnose(replace(even, prefill_s=19.9))) == 1
