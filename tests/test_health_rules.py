"""Each rule of a running server's diagnosis: where it fires, where it just does not, and missing metrics."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from continuum_lmcache.telemetry.findings import Severity
from continuum_lmcache.telemetry.health_rules import (
    ServerFigures,
    between,
    diagnose,
    summary,
    would_help,
)

HEALTHY = ServerFigures(
    policy="continuum",
    programs=10,
    running_turns=8,
    waiting_turns=9,
    held_programs=2,
    kv_usage=0.95,
    pinned_share=0.3,
    finished_turns=100,
    preemptions=5,
    first_token_s=0.25,
    prompt_tokens={"gpu": 70_000, "dram": 4_000, "none": 26_000},
    pins={"taken": 16, "reused": 13},
    working_set_tokens=200_000,
    tier_capacity_tokens={"dram": 200_000, "ssd": 150_000},
    tier_store_up=1,
    lost_tokens={"changed-first-third": 5_200, "evicted-first-third": 20_000},
    ignored_fields={"priority": 0},
)
CASES: dict[str, Any] = {
    "continuum-is-off": {"policy": ""},
    "tier-store-down": {"tier_store_up": 0},
    "low-batch-memory-full": {"running_turns": 7},
    "preemptions": {"preemptions": 6},
    "tier-too-small": {"working_set_tokens": 200_001},
    "prompts-change-in-first-third": {"lost_tokens": {"changed-first-third": 5_201}},
    "prompts-change-in-last-third": {"lost_tokens": {"changed-last-third": 5_201}},
    "ignored-fields": {"ignored_fields": {"job-id": 3}},
}


def test_a_server_at_every_limit_is_well() -> None:
    assert diagnose(HEALTHY) == []


@pytest.mark.parametrize("name", CASES)
def test_a_step_beyond_a_limit_is_found_alone_and_says_what_to_do(name: str) -> None:
    (found,) = diagnose(replace(HEALTHY, **CASES[name]))
    assert found.name == name and len(found.remedy) > 20


def test_what_stops_the_gain_is_an_error_and_a_misspelt_field_a_note() -> None:
    severities = {name: diagnose(replace(HEALTHY, **case))[0].severity for name, case in CASES.items()}
    errors = {name for name, severity in severities.items() if severity is Severity.ERROR}
    assert errors == {"continuum-is-off", "tier-store-down"}
    assert severities["ignored-fields"] is Severity.NOTE


def test_memory_full_of_pins_is_reported_as_such() -> None:
    (found,) = diagnose(replace(HEALTHY, running_turns=2))
    assert "30% of it by pins" in found.evidence


def test_a_full_server_with_an_empty_queue_is_only_busy() -> None:
    assert diagnose(replace(HEALTHY, running_turns=1, waiting_turns=0)) == []
    assert diagnose(replace(HEALTHY, running_turns=1, kv_usage=0.89)) == []


def test_shares_of_a_few_turns_are_not_judged() -> None:
    few = replace(HEALTHY, finished_turns=19, preemptions=9, lost_tokens={"changed-first-third": 26_000})
    assert diagnose(few) == []


def test_a_server_that_has_served_nothing_may_still_be_on() -> None:
    (found,) = diagnose(ServerFigures())
    assert "send a request" in found.remedy
    (found,) = diagnose(ServerFigures(finished_turns=5))
    assert "send a request" not in found.remedy


def test_the_summary_says_whether_it_is_on_and_what_it_brings() -> None:
    assert summary(HEALTHY) == (
        "continuum is on: policy continuum, 10 programs known. Prompt tokens by the source of their KV: "
        "70% gpu, 4% dram, 26% computed. Pins: 16 taken, 13 reused. "
        "First tokens came after 0.25 s on average."
    )
    assert summary(STOCK).startswith("continuum is NOT on here. Would it help? yes: 90% of the KV cache")
    assert "too early to tell: 9 turns ended" in summary(ServerFigures(finished_turns=9))


STOCK = ServerFigures(
    waiting_turns=3,
    kv_usage=0.9,
    finished_turns=100,
    preemptions=0,
    queried_tokens=1000,
    found_tokens=300,
)


@pytest.mark.parametrize(
    ("figures", "answer"),
    [
        ({}, "yes"),
        ({"kv_usage": 0.1, "preemptions": 6}, "yes"),
        (
            {"kv_usage": 0.54, "waiting_turns": 6, "found_tokens": 0},
            "yes",
        ),  # a real one, 12 agents, room for 5
        ({"queried_tokens": None, "found_tokens": None}, "yes"),  # prefix caching may be off
        ({"found_tokens": 800}, "little"),
        ({"waiting_turns": 0}, "no"),
        ({"kv_usage": 0.49, "preemptions": 5}, "no"),
        ({"finished_turns": 19}, "too early to tell"),
    ],
)
def test_a_stock_server_shows_whether_continuum_would_help(figures: dict[str, Any], answer: str) -> None:
    assert would_help(replace(STOCK, **figures))[0] == answer


def test_between_two_looks_counts_grow_and_the_fuller_state_counts() -> None:
    busy = replace(STOCK, finished_turns=150, preemptions=None, found_tokens=340, kv_usage=0.2)
    seen = between(STOCK, busy)
    assert (seen.finished_turns, seen.found_tokens, seen.queried_tokens) == (50, 40, 0)
    assert (seen.kv_usage, seen.preemptions) == (0.9, None)
    assert would_help(between(busy, STOCK))[0] == "too early to tell", "it has started anew"


def test_where_no_turn_was_pinned_the_summary_says_why() -> None:
    """Also for a user who watches the first five turns of a small model for pins."""
    short = replace(HEALTHY, pins={"taken": 0.0}, ttl_decisions={"cold-start-no-pin": 5.0, "cdf-no-pin": 1.0})
    assert "No turn was pinned: no tool gap is known yet, and to compute such a context" in summary(short)
    own = replace(short, ttl_decisions={"budget-of-my-own-no-pin": 5.0})
    assert "No turn was pinned: budget-of-my-own." in summary(own)
    assert "No turn" not in summary(replace(short, pins={"taken": 1.0}))


@given(st.sets(st.sampled_from([f.name for f in fields(ServerFigures)])))
def test_any_figure_can_be_missing(gone: set[str]) -> None:
    empty = ServerFigures()
    bad = {k: v for case in CASES.values() for k, v in case.items() if k != "policy"}
    seen = replace(replace(HEALTHY, **bad), **{name: getattr(empty, name) for name in gone})
    found = {finding.name for finding in diagnose(seen)}
    assert ("continuum-is-off" in found) == ("policy" in gone)
    assert ("tier-store-down" in found) == ("tier_store_up" not in gone)
    assert summary(seen)
