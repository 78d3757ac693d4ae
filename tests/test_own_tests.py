"""vLLM's own scheduler tests give our classes the answers that they give stock."""

from __future__ import annotations

from collections import Counter
from importlib.metadata import version

import pytest

pytest.importorskip("vllm")

from experiments.trust.own_tests import EXPLAINED, QUICK, Difference, compare, differences
from experiments.trust.packages import Unreachable


@pytest.mark.network
def test_vllms_own_scheduler_tests_pass_alike_on_our_classes_and_stock() -> None:
    """A part of them, from vLLM's source archive; `python -m experiments.trust.own_tests` runs them all."""
    try:
        stock, ours = compare(version("vllm").partition("+")[0], QUICK)
    except Unreachable as error:
        pytest.skip(str(error))
    assert Counter(stock.values())["passed"] > 20, "the tests did not run"
    assert differences(stock, ours) == []


def test_a_test_that_fails_only_with_us_or_is_missing_is_a_difference() -> None:
    stock = {"t::a": "passed", "t::b": "passed", "t::c": "failed"}
    ours = {"t::a": "failed", "t::c": "failed"}
    assert differences(stock, {"fcfs": ours}) == [
        Difference("fcfs", "t::a", "passed", "failed"),
        Difference("fcfs", "t::b", "passed", "missing"),
    ]


def test_an_explained_difference_is_one_for_the_named_policy_only() -> None:
    name = next(name for name, (policies, _) in EXPLAINED.items() if policies == ("fcfs",))
    stock, ours = {f"t::{name}": "passed"}, {f"t::{name}": "failed"}
    assert differences(stock, {"fcfs": ours}) == []
    assert [d.policy for d in differences(stock, {"continuum": ours})] == ["continuum"]
