"""The context from which loading pays: checked against the cost model."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from continuum_lmcache.capacity.plan_check import break_even_tokens, load_cost
from continuum_lmcache.reload.cost_model import UNMEASURED, CostModel, PrefillCurve, TransferRate
from continuum_lmcache.types import Residency, Tier

NEVER_S = 1e9
rates = st.builds(TransferRate, st.floats(1e7, 1e12), st.floats(0, 1), st.just(1))
curves = st.builds(
    PrefillCurve,
    st.floats(0, 0.1),
    st.floats(1e-7, 1e-3),
    st.sampled_from([0.0, 1e-12, 1e-9, 1e-7]),
    st.just(1),
)
machines = st.builds(CostModel, curves, rates, rates, st.sampled_from([8192, 131_072]), st.just(256))
LOADS = pytest.mark.parametrize("tier", [Tier.DRAM, Tier.SSD])


def seconds(line: tuple[float, float], tokens: float) -> float:
    return line[0] + tokens * line[1]


@LOADS
@given(costs=machines)
def test_beyond_the_break_even_loading_is_never_slower(tier: Tier, costs: CostModel) -> None:
    """And just before it computing is faster."""
    found = break_even_tokens(costs, tier)
    line = load_cost(costs, tier)
    if math.isinf(found):
        assert seconds(line, 1e12) >= costs.prefill.seconds(int(1e12), 0) * (1 - 1e-9)
        return
    for factor in (1.001, 2, 100):
        n = found * factor + 1
        assert seconds(line, n) <= costs.prefill.seconds(n, 0) * (1 + 1e-6)  # type: ignore[arg-type]
    if found > 100:
        n = found * 0.99
        assert seconds(line, n) >= costs.prefill.seconds(n, 0) * (1 - 1e-3)  # type: ignore[arg-type]


def test_a_load_from_disk_takes_what_the_cost_model_predicts() -> None:
    n = 10_000
    costs = replace(UNMEASURED, prefill=replace(UNMEASURED.prefill, fixed_s=NEVER_S))
    assert seconds(load_cost(costs, Tier.SSD), n) == pytest.approx(costs.reload_s(Residency(0, 0, n, n)))
    assert seconds(load_cost(costs, Tier.DRAM), n) == pytest.approx(costs.reload_s(Residency(0, n, 0, n)))
