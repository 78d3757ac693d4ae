"""The cost of our scheduler's step and turn against stock's: the contenders and the figures."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from experiments.overhead import SMOKE, TOOL, OneProgram, figures_of, one_clock, table


def test_each_figure_of_each_contender_is_in_the_table_beside_stocks() -> None:
    found = {name: figures_of(name, SMOKE) for name in ("stock", "named")}
    assert found["stock"].keys() == found["named"].keys() and min(found["named"].values()) > 0
    _, *rows = table([found])
    assert [row[1] for row in rows] == ["stock", "named"] * len(found["stock"])
    assert {row[3] for row in rows if row[1] == "stock"} == {"1.00 (1.00 to 1.00)"}
    assert sum("met" in row[4].lower() or "MISSED" in row[4] for row in rows) == 7


@pytest.mark.parametrize(("contender", "tool"), [("named", ("bash",)), ("read off", TOOL)])
def test_the_timed_turns_teach_the_tool_that_they_call(contender: str, tool: tuple[str, ...]) -> None:
    with one_clock() as place:
        timed = OneProgram(contender, 2000, *place)
        for _ in range(4):
            timed.turn()
        gaps = timed.scheduler._engine.learned.gaps.exact(tool)
    assert gaps.samples_s == pytest.approx([0.5] * 3, rel=0.1)
