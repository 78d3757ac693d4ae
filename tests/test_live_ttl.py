"""The parts of the live proof of learned TTLs that need no server: what is said, and what is read back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded import Run, told
from rich.table import Table

from continuum_lmcache.costs import Costs
from continuum_lmcache.errors import TraceError
from continuum_lmcache.records.measures import watches
from continuum_lmcache.records.recordings import Recording, load
from continuum_lmcache.records.stories import Turn
from continuum_lmcache.toolcalls import tool_key
from continuum_lmcache.types import ProgramId, Retention, ToolKey, TurnId
from experiments.cpu_profile import LENGTHS_TOKENS, profile
from experiments.forced_calls import FORMS, SHELL, Call, Script, forced, recognised, script, text
from experiments.live_tables import (
    command_of,
    levels_table,
    recognition_table,
    share,
    tool_and_level,
    ttl_table,
    views,
)
from experiments.live_ttl import Pace, chosen
from experiments.workload import Program, TurnSpec, load_trace

PYTEST = Call(SHELL, "cd /testbed && python -m pytest tests/a.py -q | tail", 1.5, 20)
READ = Call("Read", "/testbed/a.py", 0.03, 20)
LEARNED = Retention(1.5, "continuum", "cdf", probability=0.8, benefit_s=4.0, samples=150, level="tool:1")
COLD = replace(LEARNED, ttl_s=0.7, reason="cold-start", probability=0.5, level="cold")
ZERO = replace(LEARNED, ttl_s=0.0, probability=0.0, level="all")
READ_KEY: ToolKey = ("Read",)
PYTEST_KEY: ToolKey = ("pytest tests/a.py", "pytest", "bash")

# what is said ----------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("call", [PYTEST, READ, Call("TodoWrite", "", 0.02, 5)], ids=lambda c: c.tool)
def test_a_call_said_in_any_format_is_recognised(call: Call, form: str) -> None:
    assert recognised(call, tool_key(text(call, form)))


@pytest.mark.parametrize("key", [(), ("bash",), ("tail", "bash"), ("Read",)])
def test_half_of_a_command_is_not_recognised(key: ToolKey) -> None:
    assert not recognised(PYTEST, key)


def test_no_two_formats_say_the_same() -> None:
    assert len({text(PYTEST, form) for form in FORMS}) == len(FORMS)


@given(
    st.sampled_from(FORMS),
    st.text(st.characters(codec="utf-8", exclude_categories=["Cc"], exclude_characters="<["), min_size=1),
)
def test_json_calls_survive_any_argument_without_another_formats_marks(form: str, path: str) -> None:
    assert tool_key(text(Call("Read", path, 0.1, 1), form)) == READ_KEY


def test_the_whole_text_fits_the_answer_even_at_a_byte_a_token() -> None:
    said = text(Call(SHELL, "echo é漢", 0.1, 1), "block")
    assert forced(said)["max_tokens"] > len(said.encode())
    assert forced(said)["structured_outputs"] == {"choice": [said]}


@pytest.mark.parametrize("form", FORMS)
def test_every_call_of_the_real_trace_is_recognised(traces: Path, form: str) -> None:
    programs = [p for p in load_trace(traces / "agentcgroup.jsonl") if "glm" not in p.source]
    calls = [call for program in programs for call in script(program, form, 1_000).calls]
    assert len(calls) > 1_500
    assert share(recognised(call, tool_key(text(call, form))) for call in calls) == 1.0


# who plays -------------------------------------------------------------------


def program(name: str, calls: int, source: str = "haiku") -> Program:
    turn = TurnSpec(100, 10, 10, "Bash", "ls " + "x" * 500, 2.0)
    return Program(name, 0.0, (*[turn] * calls, TurnSpec(100, 10, 10)), source)


def test_a_script_ends_before_the_turn_that_calls_nothing_and_shortens_commands() -> None:
    found = script(program("a", 3), "hermes", 20)
    assert [len(call.command) for call in found.calls] == [64, 64, 64]
    assert {call.tool for call in found.calls} == {"bash"}


def test_programs_are_drawn_until_their_turns_suffice_and_none_has_model_time_in_its_gaps() -> None:
    trace = [program(f"p{i}", 9, "glm" if i % 2 else "haiku") for i in range(20)]
    scripts = chosen(trace, 45, 5, seed=0)
    assert [len(s.calls) for s in scripts] == [5] * 8  # 6 turns each, the farewell included
    assert {int(s.program[1:]) % 2 for s in scripts} == {0}
    assert {s.form for s in scripts} == set(FORMS)
    assert scripts == chosen(trace, 45, 5, seed=0)


def test_more_turns_than_the_trace_has_are_refused_with_what_it_has() -> None:
    with pytest.raises(TraceError, match="has 8 usable turns, 9 are wanted"):
        chosen([program("a", 3), program("b", 3)], 9, 5, seed=0)


def test_long_gaps_are_cut_before_they_are_scaled() -> None:
    assert Pace(0.5, 8.0).sleep_s(replace(PYTEST, gap_s=100.0)) == 4.0
    assert Pace(0.5, 8.0).sleep_s(PYTEST) == 0.75


# the measured profile --------------------------------------------------------


def test_a_profile_gives_back_the_curve_it_was_measured_on() -> None:
    seen = [(n, 0.01 + n * 5e-4 + n * n / 2 * 1e-8) for n in LENGTHS_TOKENS]
    costs = Costs.from_mapping(profile(seen))
    for n, took_s in seen:
        assert costs.prefill_s(n) == pytest.approx(took_s, rel=1e-3)
    assert not costs.measured, "DRAM and disk are guesses here"


@given(st.lists(st.floats(1e-3, 10), min_size=5, max_size=5))
def test_no_measurement_makes_a_profile_that_is_refused(took_s: list[float]) -> None:
    Costs.from_mapping(profile(list(zip(LENGTHS_TOKENS, took_s, strict=True))))


# what is read back -----------------------------------------------------------


@pytest.fixture
def scripts() -> tuple[Script, ...]:
    return (Script("a", "block", (PYTEST, READ)), Script("b", "hermes", (PYTEST, READ)))


@pytest.fixture
def run(tmp_path: Path) -> Recording:
    """Two programs of two calls, each followed by a turn; of b's pytest only the shell was understood."""
    made = Run()
    for job, pytest_key in (("a", PYTEST_KEY), ("b", ("bash",))):
        made.turn(job, f"{job}1", (0, 0, 1), tool=pytest_key, keep=COLD)
        made.turn(job, f"{job}2", (3, 3, 4), tool=READ_KEY, keep=LEARNED if job == "a" else ZERO)
        made.recorder.arrived(5, ProgramId(job), TurnId(f"{job}3"), 120)
    return load(told(tmp_path, made.recorder))


def rows(table: Table) -> dict[str, list[str]]:
    cells = [list(column.cells) for column in table.columns]
    return {str(row[0]): [str(cell) for cell in row[1:]] for row in zip(*cells, strict=True)}


def test_recognition_is_told_by_format_and_in_all(run: Recording, scripts: tuple[Script, ...]) -> None:
    found = rows(recognition_table(run, scripts))
    assert found["block"] == ["2", "1", "2", "1"]
    assert found["hermes"] == ["2", "0.5", "2", "0.5"]
    assert found["openai"] == ["0", "-", "0", "-"]
    assert found["all"] == ["4", "0.75", "4", "0.75"]


def test_ttls_by_tool_leave_the_cold_start_out_and_say_whose_gaps_answered(run: Recording) -> None:
    assert rows(ttl_table(run, tool_and_level, "TTL")) == {
        "Read, its own": ["1", "1", "1", "4", "1.5", "0.8", "1", "0"],
        "Read, of all": ["1", "1", "1", "4", "0", "0", "0", "1"],
    }


def test_a_command_is_named_by_its_program_and_a_tool_by_itself() -> None:
    turns = [Turn(0.0, tool=key) for key in (PYTEST_KEY, READ_KEY, ())]
    assert [command_of(turn) for turn in turns] == ["pytest", "Read", "(none)"]


def test_levels_are_counted_in_the_order_of_decisions(run: Recording) -> None:
    (counts,) = rows(levels_table(run)).values()
    assert counts[:3] == ["1", "2", "1"], "all, cold, tool:1"


def test_views_drop_decisions_and_never_turns(run: Recording) -> None:
    everything, learned, late = views(run, early_turns=2)
    assert [len(watches(view)) for view in (everything, learned, late)] == [3, 1, 1]
    assert {len(view.turns) for view in (everything, learned, late)} == {6}
    assert len(watches(run)) == 3, "the recording itself is left as it was"
