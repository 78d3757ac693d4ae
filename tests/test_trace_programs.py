"""Real agents' traces in the simulator: the chosen programs, and their arrivals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from continuum_lmcache.errors import TraceError
from experiments.offload_sweep import main
from experiments.sessions import TREE_IDLE_S
from experiments.sim.step_time import MACHINES
from experiments.sim.trace_programs import (
    HALVES,
    LONGEST_GAP_S,
    SOURCES,
    arriving,
    half,
    half_of,
    sessions_of,
    work_s,
)
from experiments.sweep.goals import cases, table, traces
from experiments.sweep.grids import Size
from experiments.sweep.rows import Rows
from experiments.sweep.simulated import run

A100 = MACHINES["a100"]


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder with traces of the same names and next to nothing in them."""

    def turn(kept: int, new: int, gap_s: float | None) -> dict[str, object]:
        return {"input_tokens": kept + new, "new_tokens": new, "output_tokens": 50, "gap_s": gap_s}

    for number, source in enumerate(SOURCES.values()):
        said = None if source.gaps_of else 3.0
        lines = [
            {
                "program_id": f"{number}-{i}",
                "arrival_s": 0.0,
                "source": f"x-{source.sources[0]}",
                "turns": [turn(0, 4000 + 100 * i, said), turn(4050 + 100 * i, 700, 2e4 if said else None)]
                + [turn(4800 + 100 * i, 300, None)],
            }
            for i in range(8)
        ]
        (tmp_path / source.file).write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setenv("TRACES_DIR", str(tmp_path))
    for known in (half, sessions_of):
        known.cache_clear()
    yield
    for known in (half, sessions_of):
        known.cache_clear()


@pytest.mark.usefixtures("small")
def test_a_program_is_of_one_half_for_ever_and_no_program_is_of_both() -> None:
    for name in SOURCES:
        tune, report = ({p.program_id for p in half(name, part)} for part in HALVES)
        assert tune and report and not tune & report and len(tune | report) == 8
        assert all(half_of(program) == "tune" for program in tune)


@pytest.mark.usefixtures("small")
def test_every_gap_is_known_and_none_is_longer_than_a_user_waits() -> None:
    for name in SOURCES:
        gaps_s = [turn.gap_s for p in half(name, "report") for turn in p.turns[:-1]]
        assert set(gaps_s) <= {3.0, LONGEST_GAP_S}


@pytest.mark.usefixtures("small")
def test_a_sessions_program_is_not_shrunk_but_ends_before_its_window_overflows() -> None:
    whole = {p.program_id: p for part in HALVES for p in sessions_of("mini-swe", part, 5200)}
    assert {len(p.turns) for p in whole.values()} == {1, 2, 3}
    for name, program in whole.items():
        assert program.turns[0].input_tokens == 4000 + 100 * int(name.partition("-")[2])
        assert program.context_tokens <= 5200 and program.turns[-1].gap_s is None
    assert all(1 < turn.gap_s <= TREE_IDLE_S for p in whole.values() for turn in p.turns[:-1])


@pytest.mark.usefixtures("traces")
def test_claude_codes_sessions_have_the_lengths_of_the_public_run() -> None:
    """Its 12 sessions: prompts 98,914 tokens, answers 899, P90 2,103; a running request holds 137,000."""
    turns = [t for part in HALVES for p in sessions_of("claude-code", part, 262_144) for t in p.turns]
    prompts, answers = (np.array([getattr(t, f"{of}_tokens") for t in turns]) for of in ("input", "output"))
    assert prompts.mean() == pytest.approx(98_914, rel=0.02)
    assert prompts.std() == pytest.approx(50_038, rel=0.05)
    assert answers.mean() == pytest.approx(899, rel=0.05)
    assert np.percentile(answers, 90) == pytest.approx(2_103, rel=0.1)
    assert np.average(prompts, weights=answers) == pytest.approx(137_000, rel=0.02)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("load", [0.5, 2.0])
def test_programs_arrive_with_so_many_seconds_of_work_a_second(load: float) -> None:
    programs = half("claude-code", "tune")
    found = arriving(programs, 600, load, seed=3, machine=A100)
    work = sum(work_s(p, A100) for p in found) / found[-1].arrival_s
    assert work == pytest.approx(load, rel=0.15)
    assert len({p.program_id for p in found}) == 600  # drawn again under another name: nothing is shared


@pytest.mark.parametrize(("name", "part"), [("claude-code-swe:report", "report"), ("chat", "all")])
def test_a_trace_or_half_that_is_none_is_refused_at_once_with_those_there_are(
    name: str, part: str, tmp_path: Path
) -> None:
    told = f"no trace '{name}' with half '{part}'; --trace: claude-code-swe, .*; --half: tune, report, fitted"
    with pytest.raises(TraceError, match=told):
        half(name, part)
    with pytest.raises(SystemExit, match=f"^offload_sweep: {told}$"):
        main(["sessions"], trace=name, half=part, out=tmp_path)
    assert not list(tmp_path.iterdir()), "nothing ran"


def test_without_the_folder_the_sweep_says_where_it_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACES_DIR", str(tmp_path / "nowhere"))
    with pytest.raises(SystemExit, match="no traces in .*nowhere; set TRACES_DIR"):
        main(["traces"], out=tmp_path)


@pytest.mark.usefixtures("small")
def test_a_row_of_a_trace_has_ours_against_the_better_of_its_rivals(tmp_path: Path) -> None:
    untold = traces(Size.QUICK, "tune", ["a100"], True, "claude-code, none, 1; claude-code, DRAM, 1")
    assert [goal.regime for goal in untold] == [
        "a100, claude-code, none, 1, ends not told",
        "a100, claude-code, DRAM, 1, ends not told",
    ]
    chosen = traces(Size.QUICK, "tune", ["a100"], False, "claude-code, none, 1; claude-code, DRAM, 1")
    rows = Rows(tmp_path / "rows.csv")
    for point in cases(chosen, [1]):
        rows.add(point, run(point))
    header, bare, tiered = table(rows, chosen, [1])
    assert len(header) == len(bare) == len(tiered)
    [ours], rivals = rows.of([chosen[0].at(1).ours]), rows.of(chosen[0].at(1).rivals)
    best_s = min(float(row["job_mean_s"]) for row in rivals)
    assert len(rivals) == 2 and bare[4] == f"{best_s / float(ours['job_mean_s']):.3f}"
