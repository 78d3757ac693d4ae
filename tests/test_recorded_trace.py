"""A recorded run converted into a trace equals the original programs."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import EPOCH_S, KEEP, SERVICE_S, Run, printed, written

from continuum_lmcache.recordings.reader import load
from continuum_lmcache.telemetry.events import TurnArrived, TurnFinished, TurnStarted
from continuum_lmcache.telemetry.recorder import EventRecorder
from continuum_lmcache.types import ProgramId, Residency, TurnId
from experiments.recorded_runs import to_trace
from experiments.workload import Program, TurnSpec, load_trace


def played(programs: Iterable[Program]) -> EventRecorder:
    """The programs served on virtual time by an engine without a queue."""
    recorder = EventRecorder(
        EPOCH_S, max_programs=100_000, max_events_per_program=100_000, max_events=10_000_000
    )
    for program in programs:
        now_s, name = program.arrival_s, ProgramId(program.program_id)
        for number, turn in enumerate(program.turns):
            turn_id = TurnId(f"{name}/{number}")
            recorder.record(TurnArrived(now_s, name, turn_id, turn.input_tokens))
            served = Residency(0, 0, 0, turn.input_tokens)
            recorder.record(TurnStarted(now_s, name, turn_id, served, 0.0, evicted=False))
            now_s += SERVICE_S
            tool = tuple(part for part in (turn.command, turn.tool) if part)
            last = number == len(program.turns) - 1
            recorder.record(
                TurnFinished(now_s, name, turn_id, tool, turn.context_tokens, turn.output_tokens, last, KEEP)
            )
            now_s += turn.gap_s or 0.0
    return recorder


def replayable(programs: Iterable[Program], tmp_path: Path) -> tuple[Program, ...]:
    written(tmp_path, played(programs))
    printed("convert", tmp_path, tmp_path / "trace.jsonl")
    return load_trace(tmp_path / "trace.jsonl")


def assert_same(found: Iterable[Program], expected: Iterable[Program]) -> None:
    """Token counts, tools and commands equal; times to the microseconds that files hold."""
    by_id = {program.program_id: program for program in found}
    for program in expected:
        twin = by_id.pop(program.program_id)
        assert len(twin.turns) == len(program.turns)
        for turn, (a, b) in enumerate(zip(twin.turns, program.turns, strict=True)):
            assert (a.input_tokens, a.new_tokens, a.output_tokens) == (
                b.input_tokens,
                b.new_tokens,
                b.output_tokens,
            )
            assert (a.tool, a.command) == (b.tool, b.command)
            if turn < len(program.turns) - 1:
                assert a.gap_s == pytest.approx(b.gap_s or 0.0, abs=3e-6)
        assert twin.turns[-1].gap_s is None
    assert not by_id


@st.composite
def grown_programs(draw: st.DrawFn) -> list[Program]:
    """Programs with the whole history in each prompt, as in a trace."""
    found = []
    for number in range(draw(st.integers(1, 4))):
        turns: list[TurnSpec] = []
        for _ in range(draw(st.integers(1, 5))):
            before = turns[-1].context_tokens if turns else 0
            new_tokens, output_tokens = draw(st.integers(1, 5_000)), draw(st.integers(1, 500))
            gap_s = draw(st.floats(0, 400))
            turns.append(TurnSpec(before + new_tokens, new_tokens, output_tokens, "bash", "ls", gap_s))
        found.append(Program(f"p{number}", draw(st.floats(0, 1_000)), tuple(turns)))
    return found


@settings(max_examples=50)
@given(programs=grown_programs())
def test_a_recorded_run_becomes_the_trace_it_came_from(
    tmp_path_factory: Any, programs: list[Program]
) -> None:
    found = replayable(programs, tmp_path_factory.mktemp("run"))
    assert_same(found, programs)
    earliest_s = min(program.arrival_s for program in programs)
    arrivals = {p.program_id: p.arrival_s for p in found}
    for program in programs:
        assert arrivals[program.program_id] == pytest.approx(program.arrival_s - earliest_s, abs=3e-6)


@pytest.mark.parametrize("name", ["agentcgroup", "bfcl_v4_multi_turn", "lmcache_miniswe"])
def test_real_traces_survive_recording_and_conversion(traces: Path, tmp_path: Path, name: str) -> None:
    """Their commands are longer than tool keys may be: compared without."""
    programs = [
        Program(
            p.program_id,
            p.arrival_s,
            tuple(
                TurnSpec(t.input_tokens, t.new_tokens, t.output_tokens, t.tool, "", t.gap_s) for t in p.turns
            ),
        )
        for p in load_trace(traces / f"{name}.jsonl")
    ]
    assert_same(replayable(programs, tmp_path), programs)


def test_history_that_came_back_shorter_is_new(tmp_path: Path) -> None:
    """Growth below the last answer: all of it new. A shorter prompt: another prompt."""
    run = Run()
    for number, prompt_tokens in enumerate((100, 104, 40)):
        run.turn("a", f"t{number}", (number, number, number + 0.5), prompt_tokens=prompt_tokens)
    (program,) = to_trace(load(written(tmp_path, run.recorder)))
    assert [turn["new_tokens"] for turn in program["turns"]] == [100, 4, 40]
