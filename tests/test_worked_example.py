"""docs/add-a-policy.md works as it stands: its function, its line and its test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import test_policies

from continuum_lmcache.retention import baselines, policies
from continuum_lmcache.retention.policies import POLICIES, Policy

PAGE = Path(__file__).parents[1] / "docs" / "add-a-policy.md"


def test_the_policy_of_the_page_passes_the_test_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    function, line, test = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = dict(vars(baselines))
    exec(function, names)
    monkeypatch.setattr(baselines, "twice_mean", names["twice_mean"], raising=False)
    added: dict[str, Policy] = eval("{" + line + "}", vars(policies))
    for name, policy in added.items():
        monkeypatch.setitem(POLICIES, name, policy)
    checks = dict(vars(test_policies))
    exec(test, checks)
    checks["test_twice_mean_pins_for_twice_what_the_tool_takes"]()
