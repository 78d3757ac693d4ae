"""The policy of docs/add-a-policy.md works as it stands; how a policy of your own is tested without vLLM."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from continuum_lmcache.config import ContinuumConfig
from continuum_lmcache.engine import Engine
from continuum_lmcache.policy.interface import Line, Places
from continuum_lmcache.policy.named import policy_named
from continuum_lmcache.reload.cost_model import UNMEASURED
from continuum_lmcache.retention.learned import Learned
from continuum_lmcache.tools.durations import ToolDurations
from continuum_lmcache.types import FinishedTurn, Place, ProgramId, Residency

PAGE = Path(__file__).parents[1] / "docs" / "add-a-policy.md"


@pytest.fixture
def my_policies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The page's module, on Python's path."""
    (module,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "my_policies.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("my_policies")
def test_twice_mean_pins_for_twice_what_the_tool_takes() -> None:
    tool, where = ("pytest", "bash"), Residency(0, 0, 0, 100)
    learned = Learned(UNMEASURED, ToolDurations(), {})
    turn = FinishedTurn(ProgramId("p"), 1, tool, 100, 10, where)
    retain = policy_named("my_policies:twice_mean").retain
    engine = Engine(ContinuumConfig(), learned, total_blocks=100, block_tokens=16, hash_block_tokens=16)
    assert retain(turn, engine.state_of(tool, "", where, 60)).ttl_s == 0.0
    for gap_s in (1.0, 2.0, 6.0):
        learned.gaps.observe(tool, gap_s)
    state = engine.state_of(tool, "", where, 60)
    assert retain(turn, state).ttl_s == 6.0
    assert retain(turn, replace(state, away_s=4.0)).ttl_s == 2.0


@pytest.mark.usefixtures("my_policies")
@pytest.mark.parametrize(
    ("place_s", "waiting", "is_kept"), [(59.0, 2, True), (61.0, 2, False), (61.0, 0, True)]
)
def test_minute_keeps_a_place_for_a_minute_while_others_wait(
    place_s: float, waiting: int, is_kept: bool
) -> None:
    where, config = Residency(0, 0, 0, 100), ContinuumConfig(longest_wait_s=100.0)
    turn = FinishedTurn(ProgramId("p"), 1, ("bash",), 100, 10, where, place_s=place_s)
    learned = Learned(UNMEASURED, ToolDurations(), {})
    engine = Engine(config, learned, total_blocks=100, block_tokens=16, hash_block_tokens=16)
    places = Places(config, 2, False, waiting, 0.0, 0.0, 1.0, 1.0, 1.0, Place(True, "", 0.0))
    policy = policy_named("my_policies:minute")
    assert policy.gives_up_place is not None and policy.longest_wait_s is not None
    assert policy.gives_up_place(turn, engine.state_of(turn.tool, "", where, 60), places).is_kept is is_kept
    assert policy.longest_wait_s(Line(config, 2, 1, 3, False, 1.0, 1.0)) == 120.0
