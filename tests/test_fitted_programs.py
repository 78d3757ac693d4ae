"""Programs drawn from the fit to real traces: they need no trace, and have similar sizes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from continuum_lmcache.errors import TraceError
from experiments.fit_traces import COMPARED, fitted
from experiments.offload_sweep import main
from experiments.sim.fitted_programs import LEVELS, Quantiles, Shape, generate, pool, shapes
from experiments.sim.trace_programs import FITTED, half, traces_folder
from experiments.sweep import trace_goals
from experiments.sweep.grids import Size
from experiments.workload import Program

NAMES = tuple(shapes())


@pytest.mark.parametrize("name", NAMES)
def test_fitted_programs_are_there_without_the_traces(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRACES_DIR", str(tmp_path / "none"))
    programs = half(name, FITTED)
    assert len(programs) == len({p.program_id for p in programs}) > 100


def test_a_trace_that_nothing_was_fitted_to_is_refused() -> None:
    with pytest.raises(TraceError, match="no generator was fitted to 'chat'"):
        half("chat", FITTED)


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


@given(st.lists(st.floats(1e-3, 1e6), min_size=2), st.floats(0, 1))
def test_a_quantile_lies_between_its_neighbours(found: list[float], level: float) -> None:
    fitted_to = Quantiles.of(found, 1e-3)
    assert fitted_to.values[0] * 0.99 <= fitted_to.at(level) <= fitted_to.values[-1] * 1.01
    assert list(fitted_to.values) == sorted(fitted_to.values)


def programs_of(name: str, part: str) -> Sequence[Program]:
    try:
        traces_folder()
    except TraceError as error:
        pytest.skip(str(error))
    return half(name, part)


@pytest.mark.parametrize("name", NAMES)
def test_drawn_quantiles_are_those_of_the_half_that_was_fitted(name: str) -> None:
    real, drawn = programs_of(name, "tune"), generate(shapes()[name], name, 1000, 2)
    for what in ("first prompt, tokens", "output of a turn, tokens", "tool, s"):
        for level in (0.25, 0.5, 0.75, 0.9):
            was, now = (np.quantile(COMPARED[what](of), level) for of in (real, drawn))
            assert now == pytest.approx(was, rel=0.35), f"{what} at {level}"
    middles = [np.median(COMPARED["final context, tokens"](of)) for of in (real, drawn)]
    assert middles[1] == pytest.approx(middles[0], rel=0.25)


@pytest.mark.parametrize("name", NAMES)
def test_the_file_is_what_the_fit_gives_today(name: str) -> None:
    assert Shape.read(fitted(name, programs_of(name, "tune"))) == shapes()[name]


def test_the_goals_table_of_fitted_programs_has_every_agent_and_no_chat() -> None:
    points = trace_goals.points(Size.DEFAULT, FITTED, [3], ["a100"])
    assert {point.workload for point in points} == {f"trace:{name}:fitted" for name in NAMES}
    assert {trace_goals.name_of(point) for point in points} >= {"a100, bfcl, none, 1"}


def test_an_unknown_half_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="known: tune, report, fitted"):
        main(["traces"], half="thirds", out=tmp_path)


def test_levels_span_all() -> None:
    assert LEVELS[0] == 0.0 and LEVELS[-1] == 1.0 and list(LEVELS) == sorted(LEVELS)
