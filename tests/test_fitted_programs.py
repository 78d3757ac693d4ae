"""Programs drawn from the fit to real traces: they need no trace, and have similar sizes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from experiments.sim.fitted_programs import generate, pool, shapes
from experiments.sim.trace_programs import FITTED, half

NAMES = tuple(shapes())


@pytest.mark.parametrize("name", NAMES)
def test_fitted_programs_are_there_without_the_traces(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRACES_DIR", str(tmp_path / "none"))
    programs = half(name, FITTED)
    assert len(programs) == len({p.program_id for p in programs}) > 100


@pytest.mark.parametrize("name", NAMES)
def test_each_drawn_program_is_one_that_an_agent_could_have_run(name: str) -> None:
    for program in pool(name):
        assert program.context_tokens <= shapes()[name].window_tokens
        assert program.turns[-1].gap_s is None and all(turn.gap_s for turn in program.turns[:-1])
        assert program.turns[0].kept_tokens == 0
        for before, turn in pairwise(program.turns):
            assert 0 <= turn.kept_tokens <= before.context_tokens and turn.new_tokens >= 0


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_gives_the_same_programs_and_another_others(name: str) -> None:
    shape = shapes()[name]
    assert generate(shape, name, 5, 1) == generate(shape, name, 9, 1)[:5]
    assert [p.turns for p in generate(shape, name, 5, 1)] != [p.turns for p in generate(shape, name, 5, 2)]
