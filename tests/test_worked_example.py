"""docs/add-a-policy.md works as it stands: its module and its test."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "add-a-policy.md"


def test_the_policy_of_the_page_passes_the_test_of_the_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module, test = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "my_policies.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    checks: dict[str, Any] = {}
    exec(test, checks)
    checks["test_twice_mean_pins_for_twice_what_the_tool_takes"]()
