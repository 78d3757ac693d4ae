"""Mixed traffic: questions that name nothing beside agents, and the first tokens of each."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from experiments.mixed import HEAD, questions, run
from experiments.sweep.cases import STOCK, Point
from experiments.sweep.simulated import programs_of

SMALL = Point(STOCK, 3, 0.0, 1, "trace:claude-code-swe:fitted", load=1.0, kv_contexts=6.0, merge_steps=8)


def test_questions_have_one_turn_name_nothing_and_end_with_the_agents() -> None:
    agents = programs_of(SMALL)
    asked = questions(agents, 0.5, seed=1)
    assert {len(program.turns) for program in asked} == {1} and {p.source for p in asked} == {"unnamed"}
    assert len(asked) == int(0.5 * max(program.arrival_s for program in agents)) > 10


def test_the_first_tokens_of_questions_and_of_agents_are_told_apart() -> None:
    figures = dict(zip(HEAD[2:], run(SMALL, 0.5), strict=True))
    for who in ("questions", "agents"):
        p50, p90, p99, longest = (figures[f"{who}, {part}"] for part in ("P50, s", "P90", "P99", "longest"))
        assert 0 < p50 <= p90 <= p99 <= longest
    assert figures["agents' mean job time, s"] > figures["agents, longest"]
