"""Each rule of a running server's diagnosis: where it fires, where it just does not, and missing metrics."""

from __future__ import annotations

import time
from typing import Any

import pytest
from console import page_with
from hypothesis import given
from hypothesis import strategies as st

from continuum_lmcache.console.health_rules import RUNNING, WAITING, diagnose, summary, would_help
from continuum_lmcache.telemetry.findings import Severity

USAGE, PREEMPTIONS = "vllm:kv_cache_usage_perc", "vllm:num_preemptions_total"
FINISHED, QUERIED = "vllm:request_success_total", "vllm:prefix_cache_queries_total"
FOUND, BELOW = "vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total"
ON, UP = 'continuum_policy_info{policy="continuum"}', "continuum_tier_store_up"
CONTEXTS, LOST = "continuum_working_set_tokens", 'continuum_lost_tokens_total{cause="%s"}'
TAKEN, DECIDED = 'continuum_pins_total{outcome="taken"}', 'continuum_ttl_decisions_total{reason="%s"}'
LINKED = 'continuum_unnamed_prompts_total{outcome="linked"}'
PROBE = 'continuum_new_weights_total{call="liveness_probe"}'
HEALTHY: dict[str, float] = {
    ON: 1,
    "continuum_programs": 10,
    RUNNING: 8,
    WAITING: 9,
    USAGE: 0.95,
    'vllm:cache_config_info{engine="0",num_gpu_blocks="60"}': 1,
    'vllm:cache_config_info{engine="1",num_gpu_blocks="40"}': 1,
    "continuum_pinned_blocks": 30,
    FINISHED: 100,
    PREEMPTIONS: 5,
    "vllm:time_to_first_token_seconds_sum": 25,
    "vllm:time_to_first_token_seconds_count": 100,
    'continuum_prompt_tokens_total{tier="gpu"}': 70_000,
    'continuum_prompt_tokens_total{tier="dram"}': 4_000,
    'continuum_prompt_tokens_total{tier="none"}': 26_000,
    TAKEN: 16,
    'continuum_pins_total{outcome="reused"}': 13,
    CONTEXTS: 200_000,
    'continuum_tier_capacity_tokens{tier="dram"}': 200_000,
    'continuum_tier_capacity_tokens{tier="ssd"}': 150_000,
    UP: 1,
    'continuum_tier_faults_total{fault="damaged_chunk"}': 0,
    'continuum_tier_faults_total{fault="failed_store"}': 0,
    LOST % "changed-first-third": 5_200,
    LOST % "evicted-first-third": 20_000,
    'continuum_ignored_fields_total{field="priority"}': 0,
    'continuum_unnamed_prompts_total{outcome="first"}': 20,
    LINKED: 1,
}
CASES: dict[str, dict[str, float | None]] = {
    "continuum-is-off": {ON: None},
    "tier-store-down": {UP: 0},
    "damaged-chunks": {'continuum_tier_faults_total{fault="damaged_chunk"}': 1},
    "failed-stores": {'continuum_tier_faults_total{fault="failed_store"}': 1},
    "low-batch-memory-full": {RUNNING: 7},
    "preemptions": {PREEMPTIONS: 6},
    "tier-too-small": {CONTEXTS: 200_001},
    "prompts-change-in-first-third": {LOST % "changed-first-third": 5_201},
    "prompts-change-in-last-third": {LOST % "changed-last-third": 5_201},
    "ignored-fields": {'continuum_ignored_fields_total{field="job-id"}': 3},
    "new-weights": {PROBE: 31},
    "never-linked": {LINKED: 0},
}


def healthy(changes: Any = ()) -> Any:
    """A page of HEALTHY with other values; None: without that metric."""
    return page_with({name: n for name, n in (HEALTHY | dict(changes)).items() if n is not None})


def test_a_server_at_every_limit_is_well() -> None:
    assert diagnose(healthy()) == []


@pytest.mark.parametrize("name", CASES)
def test_a_step_beyond_a_limit_is_found_alone_and_says_what_to_do(name: str) -> None:
    (found,) = diagnose(healthy(CASES[name]))
    assert found.name == name and len(found.remedy) > 20


def test_a_store_that_is_down_is_an_error_and_a_misspelt_field_a_note() -> None:
    severities = {name: diagnose(healthy(case))[0].severity for name, case in CASES.items()}
    errors = {name for name, severity in severities.items() if severity is Severity.ERROR}
    assert errors == {"tier-store-down"}
    assert severities["ignored-fields"] is Severity.NOTE


@pytest.mark.parametrize(
    ("field", "setting"),
    [("extra_body", ""), ("priority", "honor_priority"), ("program_turns", "honor_program_age")],
)
def test_of_an_ignored_field_the_setting_is_named_that_honours_it(field: str, setting: str) -> None:
    (found,) = diagnose(healthy({f'continuum_ignored_fields_total{{field="{field}"}}': 3}))
    assert ("continuum." in found.remedy) == bool(setting) and setting in found.remedy


def test_memory_full_of_pins_is_reported_as_such() -> None:
    (found,) = diagnose(healthy({RUNNING: 2}))
    assert "30% of it by pins" in found.evidence


def test_a_full_server_with_an_empty_queue_is_only_busy() -> None:
    assert diagnose(healthy({RUNNING: 1, WAITING: 0})) == []
    assert diagnose(healthy({RUNNING: 1, USAGE: 0.89})) == []


def test_shares_of_a_few_turns_are_not_judged() -> None:
    few = {FINISHED: 19, PREEMPTIONS: 9, LOST % "changed-first-third": 26_000}
    assert diagnose(healthy(few)) == []


def test_the_summary_says_whether_it_is_on_and_what_it_brings() -> None:
    assert summary(healthy()) == (
        "continuum is on: policy continuum, 10 programs known. Prompt tokens by the source of their KV: "
        "70% gpu, 4% dram, 26% computed. Pins: 16 taken, 13 reused. "
        "First tokens came after 0.25 s on average."
    )
    assert summary(page_with(STOCK)).startswith("continuum is NOT on here. Would it help? yes: 90% of the KV")
    assert "too early to tell: 9 turns ended" in summary(page_with({FINISHED: 9}))


STOCK: dict[str, float] = {WAITING: 3, USAGE: 0.9, FINISHED: 100, PREEMPTIONS: 0, QUERIED: 1000, FOUND: 300}


@pytest.mark.parametrize(
    ("figures", "answer"),
    [
        ({}, "yes"),
        ({USAGE: 0.1, PREEMPTIONS: 6}, "yes"),
        ({USAGE: 0.54, WAITING: 6, FOUND: 0}, "yes"),  # a real one, 12 agents, room for 5
        ({QUERIED: 0, FOUND: 0}, "yes"),  # prefix caching may be off
        ({FOUND: 800}, "little"),
        ({BELOW: 500}, "little"),
        ({WAITING: 0}, "no"),
        ({USAGE: 0.49, PREEMPTIONS: 5}, "no"),
        ({FINISHED: 19}, "too early to tell"),
    ],
)
def test_a_stock_server_shows_whether_continuum_would_help(figures: dict[str, float], answer: str) -> None:
    assert would_help(page_with(STOCK | figures))[0] == answer


def test_between_two_looks_counts_grow_and_the_fuller_state_counts() -> None:
    later = STOCK | {FINISHED: 150, PREEMPTIONS: 2, QUERIED: 1100, FOUND: 340, USAGE: 0.2}
    answer, because = would_help(page_with(later), page_with(STOCK))
    assert answer == "yes" and because.startswith(
        "90% of the KV cache is in use, 3 turns waiting, 2 preemptions for 50 turns, and 40% of the prompt"
    )
    assert would_help(page_with(STOCK), page_with(later))[0] == "too early to tell", "it has started anew"


def test_where_no_turn_was_pinned_the_summary_says_why() -> None:
    """Also for a user who watches the first five turns of a small model for pins."""
    short = {TAKEN: 0, DECIDED % "cold-start-no-pin": 5, DECIDED % "cdf-no-pin": 1}
    assert "No turn was pinned: no tool gap is known yet, and to compute such a context" in summary(
        healthy(short)
    )
    own = {TAKEN: 0, DECIDED % "budget-of-my-own-no-pin": 5}
    assert "No turn was pinned: budget-of-my-own." in summary(healthy(own))
    assert "No turn" not in summary(healthy(short | {TAKEN: 1}))


@given(st.sets(st.sampled_from(list(HEALTHY))))
def test_any_metric_can_be_missing(gone: set[str]) -> None:
    bad = {k: v for case in CASES.values() for k, v in case.items() if k != ON}
    seen = healthy(bad | dict.fromkeys(gone))
    found = {finding.name for finding in diagnose(seen)}
    assert ("continuum-is-off" in found) == (ON in gone)
    assert ("tier-store-down" in found) == (UP not in gone)
    assert summary(seen)


def test_what_drops_kv_often_is_named_with_how_often_and_since_when() -> None:
    """A trainer that syncs between its batches is nothing to mend."""
    sync = 'continuum_new_weights_total{call="update_weights"}'
    started = {"process_start_time_seconds": time.time() - 300}
    (often,) = diagnose(healthy({PROBE: 30, sync: 1, **started}))
    assert "31 times in 5 minutes, by liveness_probe, update_weights" in often.evidence
    assert often.severity is Severity.WARNING
    (seldom,) = diagnose(healthy({sync: 5}))
    assert "5 times, by update_weights" in seldom.evidence and seldom.severity is Severity.NOTE
