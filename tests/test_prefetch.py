"""What lies on a disk is on its way to DRAM before the tool returns."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from continuum_lmcache.distributions import Distribution, kaplan_meier
from continuum_lmcache.prefetch import EARLY_SHARE, LEAD, Plan, Plans, start_s
from continuum_lmcache.types import ProgramId

GAPS_S = st.lists(st.floats(0.01, 1000.0), min_size=1, max_size=30).map(sorted)


def seen(gaps_s: list[float], lost_s: tuple[float, ...] = ()) -> Distribution:
    return Distribution("tool:1", tuple(gaps_s), kaplan_meier(gaps_s, lost_s), len(gaps_s) + len(lost_s))


@given(GAPS_S, st.floats(0.01, 0.99))
def test_within_s_is_the_least_gap_that_the_share_does_not_exceed(gaps_s: list[float], share: float) -> None:
    gaps = seen(gaps_s)
    found = gaps.within_s(share)
    assert gaps.probability(found) >= share
    assert all(gaps.probability(s) < share for s in gaps_s if s < found)


def test_a_tool_that_mostly_never_returns_is_not_prepared_for() -> None:
    assert seen([5.0], lost_s=(1.0, 2.0, 3.0)).within_s(0.9) == 5.0, "those that were lost said nothing of it"
    assert seen([1.0], lost_s=(2.0, 3.0, 4.0)).within_s(0.5) == math.inf
    assert Distribution("cold", (), (), 0).within_s(0.25) == math.inf


def test_a_fetch_begins_so_that_the_disk_has_read_it_when_the_early_ones_return() -> None:
    gaps = seen([float(s) for s in range(1, 101)])
    assert gaps.within_s(EARLY_SHARE) == 25.0
    assert start_s(1000.0, gaps, read_s=4.0) == 1000.0 + 25.0 - LEAD * 4.0
    assert start_s(1000.0, gaps, read_s=400.0) == 1000.0, "not before it has paused"


def test_plans_are_taken_once_soonest_first() -> None:
    plans = Plans()
    for due_s in (3.0, 1.0, 2.0):
        plans.add(Plan(due_s, ProgramId(f"p{due_s}"), 0.0, lambda: False, lambda: None))
    assert [plan.due_s for plan in plans.due(2.0)] == [1.0, 2.0]
    assert plans.due(2.5) == [] and len(plans) == 1


# on vLLM's scheduler, in virtual time ------------------------------------------------------------------

pytest.importorskip("vllm")

from test_load_or_recompute import (  # noqa: E402
    A100,
    DISK_ONLY,
    a_profile,
    engine,
    keeper_after,
    returns,
    rotation,
)

from continuum_lmcache.vllm_plugin.prefetcher import Prefetcher  # noqa: E402
from experiments.sim.engine import simulate  # noqa: E402
from experiments.sim.serving import Setup  # noqa: E402

THREE_CONTEXTS = {**DISK_ONLY, "dram_gb": 3 * 8000 * A100.kv_bytes_per_token / 2**30}


def setup(folder: Path, beside: bool = False, **settings: Any) -> Setup:
    """Six contexts take turns on a GPU for one, with DRAM for three: an LRU holds none that is asked for."""
    made = replace(engine({**THREE_CONTEXTS, "async": beside}, a_profile(folder)), policy="continuum")
    return replace(made, continuum={**made.continuum, "admission": False, "stop_stores": False, **settings})


def test_a_context_that_dram_has_lost_is_there_again_when_its_tool_returns(tmp_path: Path) -> None:
    ahead, without = (simulate(rotation(), setup(tmp_path, prefetch=on)) for on in (True, False))
    assert without.tokens["dram"] < 0.05 * sum(without.tokens.values())
    assert ahead.tokens["dram"] > 0.3 * sum(ahead.tokens.values())
    assert median(returns(ahead)) < 0.7 * median(returns(without))


@pytest.mark.parametrize("other", [{"beside": True}, {"policy": "program-fcfs"}], ids=str)
def test_loads_beside_the_steps_and_other_policies_are_left_alone(
    tmp_path: Path, other: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Prefetcher, "look", lambda self, _: self._store is None or pytest.fail("it fetches"))
    policy = other.pop("policy", "continuum")
    simulate(rotation(), replace(setup(tmp_path, **other), policy=policy))


def test_a_program_that_is_back_or_on_the_gpu_still_is_not_fetched(tmp_path: Path) -> None:
    roomy = replace(setup(tmp_path), machine=replace(A100, kv_tokens=80_000))
    result = simulate(rotation(), roomy)
    assert result.tokens["dram"] == result.tokens["ssd"] == 0
    assert keeper_after(roomy).supply.prefetches == 0 < keeper_after(setup(tmp_path)).supply.prefetches
