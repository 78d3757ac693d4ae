"""Learned tool durations, and which are used."""

import json
import logging
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from continuum_lmcache.tools.durations import (
    COLD_SAMPLES,
    MAX_GAP_S,
    MAX_KEYS,
    SHORTEST_GAP_S,
    WINDOW,
    DurationsError,
    ToolDurations,
)
from continuum_lmcache.vllm_plugin.files import EngineFiles, load_durations

PYTEST = ("pytest tests", "pytest", "bash")
MAKE = ("make all", "make", "bash")
GAPS_S = st.floats(0.0, 1e5)
TOOLS = st.sampled_from([PYTEST, MAKE, ("bash",), ("read",), ()])
EVENTS = st.lists(st.tuples(TOOLS, GAPS_S, st.booleans()), max_size=60)


def learned(*batches):
    """Gaps from (tool, gaps) pairs."""
    gaps = ToolDurations()
    for tool, gaps_s in batches:
        for gap_s in gaps_s:
            gaps.observe(tool, gap_s)
    return gaps


def after(events):
    """Gaps from (tool, gap, whether it ended)."""
    gaps = ToolDurations()
    for tool, gap_s, ended in events:
        if ended:
            gaps.observe(tool, round(gap_s, 6))
        else:
            gaps.add_lost(tool)
    return gaps


def test_the_nearest_level_with_an_ended_gap_is_used_however_few_it_has() -> None:
    gaps = learned((("pytest", "tests"), [4.0]), (("read",), [9.0]))
    assert gaps.most_specific(("pytest", "tests")).samples_s == (4.0,)
    assert gaps.most_specific(("never", "seen")).samples_s == (4.0, 9.0)
    assert ToolDurations().most_specific(("read",)).samples_s == ()


def test_nothing_is_learned_until_more_than_k_gaps_were_seen():
    gaps = learned((PYTEST, [1.0] * COLD_SAMPLES))
    assert gaps.distribution(PYTEST).level == "cold"
    assert gaps.distribution(PYTEST).n == COLD_SAMPLES
    gaps.observe(PYTEST, 1.0)
    assert gaps.distribution(PYTEST).level == "tool:3"


def test_while_cold_a_gap_is_exp_1():
    assert ToolDurations().distribution(PYTEST).probability(math.log(2)) == pytest.approx(0.5)
    assert ToolDurations().distribution(PYTEST).probability(0.0) == 0.0


def test_a_key_that_was_seen_too_little_falls_back_level_by_level():
    gaps = learned((MAKE, [5.0] * 101), (("read",), [0.1] * 50), (PYTEST, [2.0] * 100))
    assert gaps.distribution(MAKE).level == "tool:3"
    assert gaps.distribution(("make test", "make", "bash")).level == "tool:2"
    assert gaps.distribution(PYTEST).level == "tool:1"
    assert gaps.distribution(("read",)).level == "all"
    assert gaps.distribution(()).level == "all"
    assert gaps.distribution(()).n == 251


def test_an_abandoned_call_is_longer_than_all_that_ended():
    gaps = learned((PYTEST, [1.0, 3.0]))
    gaps.add_lost(PYTEST)
    gaps.observe(PYTEST, 2.0)
    assert gaps.exact(PYTEST).cdf == (1 / 4, 2 / 4, 3 / 4)


def test_a_tool_that_never_returns_is_never_predicted_to():
    gaps = learned((MAKE, [1.0] * 200))
    for _ in range(101):
        gaps.add_lost(("ask_human",))
    seen = gaps.distribution(("ask_human",))
    assert (seen.level, seen.n, seen.samples_s, seen.probability(1e5)) == ("tool:1", 101, (), 0.0)


def test_a_call_that_was_given_up_too_early_leaves_no_trace():
    gaps = learned((PYTEST, [1.0] * 200))
    before = gaps.dumps()
    gaps.add_lost(PYTEST)
    assert gaps.longer_share(PYTEST, math.inf) == pytest.approx(1 / 201, rel=1e-4)
    gaps.withdraw_lost(PYTEST)
    gaps.withdraw_lost(("read",))  # which has none
    assert gaps.dumps() == before and gaps.longer_share(PYTEST, math.inf) == 0.0


def test_a_few_calls_tell_a_tool_that_ends_programs_from_one_that_does_not():
    gaps = learned((MAKE, [1.0] * 200))
    assert gaps.longer_share(("submit", "bash"), math.inf) == 0.0, "nothing is known of it"
    for _ in range(6):
        gaps.add_lost(("submit", "bash"))
    assert gaps.longer_share(("submit", "bash"), math.inf) > 0.5
    assert gaps.longer_share(MAKE, math.inf) < 0.05
    assert gaps.longer_share(("ask_human",), math.inf) < 0.05, "as all tools together"
    for _ in range(6):
        gaps.observe(("submit", "bash"), 1.0)
    assert gaps.longer_share(("submit", "bash"), math.inf) < 0.5


def test_a_gap_that_cannot_be_is_refused():
    gaps = ToolDurations()
    for gap_s in (-0.001, math.nan, math.inf, -math.inf, MAX_GAP_S * 2):
        gaps.observe(PYTEST, gap_s)
    assert gaps.distribution(PYTEST).n == 0


def test_a_gap_of_no_time_is_still_a_gap_that_a_pin_can_cover():
    assert learned((PYTEST, [0.0])).exact(PYTEST).samples_s == (SHORTEST_GAP_S,)


def test_the_oldest_gap_leaves_a_full_window():
    gaps = learned((("read",), [9.0] * 10 + [1.0] * (WINDOW - 10)))
    assert gaps.exact(("read",)).samples_s[-1] == 9.0
    for _ in range(10):
        gaps.observe(("read",), 2.0)
    assert gaps.exact(("read",)).samples_s == (1.0,) * (WINDOW - 10) + (2.0,) * 10


def test_the_oldest_leaves_even_if_it_never_ended():
    gaps = ToolDurations()
    gaps.add_lost(("read",))
    for _ in range(WINDOW):
        gaps.observe(("read",), 1.0)
    assert gaps.exact(("read",)).samples_s == (1.0,) * WINDOW
    assert gaps.exact(("read",)).cdf[-1] == 1.0


def test_the_key_that_was_seen_least_is_forgotten():
    gaps = ToolDurations()
    for i in range(MAX_KEYS + 50):
        gaps.observe((f"tool{i}",), 1.0)
        gaps.observe(("read",), 0.1)
    assert gaps.exact(("tool0",)).n == 0
    assert gaps.exact((f"tool{MAX_KEYS + 49}",)).n == 1
    assert gaps.exact(("read",)).n == MAX_KEYS + 50
    assert gaps.distribution(()).n == WINDOW


@given(EVENTS, st.lists(GAPS_S, min_size=2, max_size=10))
def test_p_is_a_distribution_whatever_was_seen(events, at_s):
    seen = after(events).exact(())
    assert list(seen.samples_s) == sorted(seen.samples_s)
    curve = [seen.probability(t) for t in sorted(at_s)]
    assert curve == sorted(curve)
    assert all(0.0 <= p <= 1.0 + 1e-12 for p in curve)


@given(EVENTS)
def test_what_was_saved_is_what_is_loaded(events):
    gaps = after(events)
    again = ToolDurations.loads(gaps.dumps())
    assert again.dumps() == gaps.dumps()
    for tool, _, _ in events:
        assert again.exact(tool) == gaps.exact(tool)


def saved(**changes):
    entry = {"levels": ["read"], "gaps_s": [1.0, 2.0], "unended": [1]} | changes
    return json.dumps({"version": 1, "keys": [entry]})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "version 1"),
        ('{"version": 2, "keys": []}', "version 1"),
        ('{"version": 1, "keys": {}}', "keys must be"),
        ('{"version": 1, "keys": [], "tenants": []}', "'tenants'"),
        ('{"version": 1, "keys": [], "tenants": {"a": [3]}}', r"tenants\['a'\]\[0\]"),
        ('{"version": 1, "keys": [3]}', r"keys\[0\]"),
        (saved(levels="read"), r"keys\[0\].levels"),
        (saved(levels=["a"] * 5), r"keys\[0\].levels"),
        (saved(gaps_s=[-1.0]), r"keys\[0\].gaps_s"),
        (saved(gaps_s=[math.nan]), r"keys\[0\].gaps_s"),
        (saved(gaps_s=[True]), r"keys\[0\].gaps_s"),
        (saved(gaps_s=[1.0] * (WINDOW + 1)), r"keys\[0\].gaps_s"),
        (saved(unended=["x"]), r"keys\[0\].unended"),
        (json.dumps({"version": 1, "keys": [{}] * (MAX_KEYS + 1)}), "at most"),
    ],
)
def test_malformed_saved_gaps_are_refused_by_name_and_place(text, says):
    with pytest.raises(DurationsError, match=says):
        ToolDurations.loads(text)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_tenant_has_its_own_durations_also_after_a_restart(restarts):
    gaps = ToolDurations()
    for number in range(200):
        gaps.observe(PYTEST, 1.0, "mine")
        gaps.observe(PYTEST, 50.0 + number % 2, "another's")
    gaps = ToolDurations.loads(gaps.dumps()) if restarts else gaps
    assert gaps.of("mine").distribution(PYTEST).mean_s == 1.0
    assert gaps.of("another's").distribution(PYTEST).mean_s == 50.5
    assert gaps.of("a third's").distribution(PYTEST).mean_s == pytest.approx(25.75), "everybody's, while cold"


@pytest.mark.parametrize("restarts", [False, True])
def test_a_tenants_durations_outlive_any_number_of_others_that_come_once(restarts):
    gaps = ToolDurations()
    for _ in range(200):
        gaps.observe(PYTEST, 3.0, "mine")
    gaps = ToolDurations.loads(gaps.dumps()) if restarts else gaps
    for number in range(1000):
        gaps.observe(PYTEST, 0.1, f"other-{number}")
    assert gaps.of("mine").distribution(PYTEST).mean_s == 3.0


def test_a_tools_durations_outlive_any_number_of_names_that_come_once():
    gaps = learned((("bash",), [3.0] * 200))
    gaps.observe(("read",), 1.0, "another's")
    for number in range(1000):
        gaps.observe((f"name-{number}",), 0.1)
    assert gaps.of("").distribution(("bash",)).mean_s == gaps.distribution(("bash",)).mean_s == 3.0


def test_gaps_survive_a_restart(tmp_path):
    path = tmp_path / "state" / "gaps.json"
    gaps = learned((PYTEST, [1.5, 2.5]))
    for number in range(70):
        gaps.observe(MAKE, 1.0, f"tenant-{number}")
    assert load_durations(path).dumps() == ToolDurations().dumps()
    EngineFiles(gaps, path).save()
    assert load_durations(path).dumps() == gaps.dumps()
    assert [p.name for p in path.parent.iterdir()] == ["gaps.json"]


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b'{"version": 1}'])
def test_a_corrupt_file_is_set_aside_with_a_warning(tmp_path, caplog, content):
    path = tmp_path / "gaps.json"
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert load_durations(path).dumps() == ToolDurations().dumps()
    assert "set aside as" in caplog.text
    assert not path.exists()
    assert path.with_name("gaps.json.corrupt").read_bytes() == content


def test_a_file_that_cannot_be_read_stops_nothing(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        assert load_durations(tmp_path).dumps() == ToolDurations().dumps()  # a folder
    assert "starting without them" in caplog.text
