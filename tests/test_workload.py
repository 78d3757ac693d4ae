"""Programs: a trace's format, the generators, and what shrinking keeps."""

import json
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from continuum_lmcache.errors import TraceError
from experiments.selection import Selection
from experiments.table1 import GENERATORS, generate
from experiments.workload import (
    Program,
    TurnSpec,
    load_trace,
    poisson_arrivals,
    scaled,
    unknown_gaps,
    with_gaps,
)

FIRST = {"input_tokens": 100, "new_tokens": 100, "output_tokens": 20, "tool": "bash", "gap_s": 1.5}
SECOND = {"input_tokens": 150, "new_tokens": 30, "output_tokens": 5, "tool": None, "gap_s": None}
LINE = {"program_id": "p", "arrival_s": 2.0, "source": "s", "turns": [FIRST, SECOND]}


def trace(tmp_path, *lines):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def with_turn(**changes):
    return LINE | {"turns": [FIRST, SECOND | changes]}


def test_a_trace_is_read_as_it_is_written(tmp_path):
    assert load_trace(trace(tmp_path, LINE, "")) == (
        Program("p", 2.0, (TurnSpec(100, 100, 20, "bash", "", 1.5), TurnSpec(150, 30, 5)), "s"),
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "Expecting"),
        ("[]", "the line is []; it must be a JSON object"),
        (LINE | {"program_id": ""}, "program_id is ''"),
        (LINE | {"turns": []}, "turns is []"),
        (LINE | {"arrival_s": -1}, "arrival_s is -1; it must be a number of seconds >= 0"),
        (LINE | {"arrival_s": True}, "arrival_s is True"),
        (LINE | {"arival_s": 1}, "unknown field 'arival_s'; did you mean 'arrival_s'?"),
        ({"program_id": "p", "arrival_s": 0}, "the line has no 'turns'"),
        (with_turn(input_tokens=1.5), "turns[1].input_tokens is 1.5; it must be a whole number >= 1"),
        (with_turn(output_tokens=-1), "turns[1].output_tokens is -1"),
        (with_turn(new_tokens=29), "turns[1].new_tokens is 29; it must be input_tokens less a part"),
        (with_turn(new_tokens=151), "turns[1].new_tokens is 151"),
        (with_turn(gap_s=float("nan")), "turns[1].gap_s is nan"),
        (with_turn(gap_s="1"), "turns[1].gap_s is '1'"),
    ],
)
def test_a_bad_line_is_refused_with_its_file_number_and_field(tmp_path, line, said):
    with pytest.raises(TraceError) as refused:
        load_trace(trace(tmp_path, LINE | {"program_id": "good"}, line))
    assert "trace.jsonl:2: " in str(refused.value)
    assert said in str(refused.value)


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_a_line_separator_inside_a_command_ends_no_line(tmp_path, separator):
    """JSON may hold them unescaped, and shell commands of models have them."""
    path = tmp_path / "trace.jsonl"
    line = with_turn(command=f"grep {separator} a.txt")
    path.write_text(json.dumps(line, ensure_ascii=False) + "\r\n", encoding="utf-8")
    assert load_trace(path)[0].turns[1].command == f"grep {separator} a.txt"


def test_a_program_id_may_not_appear_twice(tmp_path):
    with pytest.raises(TraceError, match=r":2: program_id is 'p'"):
        load_trace(trace(tmp_path, LINE, LINE))


@pytest.mark.parametrize("content", [b"", b"\xff\xfe"])
def test_an_empty_or_binary_file_is_refused(tmp_path, content):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"bad\.jsonl"):
        load_trace(path)


def test_a_published_sweeps_jobs_can_be_played_on_a_server():
    programs = Selection(1, generator="seeds-sweep", count=24, jps=3.0).programs()
    assert len(programs) == 24 and {len(p.turns) for p in programs} == {8}
    assert programs[-1].arrival_s == pytest.approx(8, rel=0.5)


@pytest.mark.parametrize("name", GENERATORS)
def test_the_generators_keep_to_table_1(name):
    shape, programs = GENERATORS[name], generate(name, 1500, 7)
    totals = [p.turns[-1].context_tokens for p in programs]
    assert statistics.mean(len(p.turns) for p in programs) == pytest.approx(shape.turns.mean, rel=0.05)
    assert statistics.stdev(len(p.turns) for p in programs) == pytest.approx(shape.turns.sd, rel=0.1)
    assert statistics.mean(totals) == pytest.approx(shape.tokens.mean, rel=0.07)
    assert statistics.stdev(totals) == pytest.approx(shape.tokens.sd, rel=0.2)
    gaps_s = [t.gap_s for p in programs for t in p.turns[:-1]]
    assert statistics.mean(gaps_s) == pytest.approx(shape.tool_s.mean, rel=0.1)
    assert all(p.turns[-1].gap_s is None for p in programs)


@st.composite
def programs_of_any_shape(draw):
    turns, history = [], 0
    for _ in range(draw(st.integers(1, 12))):
        kept = draw(st.one_of(st.just(history), st.integers(0, history)))
        new = draw(st.integers(0 if kept else 1, 50_000))
        turns.append(TurnSpec(kept + new, new, draw(st.integers(0, 9_000)), "t", "", 1.0))
        history = turns[-1].context_tokens
    return Program("p", 0.0, tuple(turns))


@given(st.lists(programs_of_any_shape(), min_size=1, max_size=4), st.integers(40, 20_000))
def test_scaled_programs_fit_and_keep_their_shape(programs, window):
    small = scaled(programs, window)
    assert max(p.context_tokens for p in small) <= window
    for before, after in zip(programs, small, strict=True):
        assert [bool(t.new_tokens) for t in after.turns] == [bool(t.new_tokens) for t in before.turns]
        assert [bool(t.output_tokens) for t in after.turns] == [bool(t.output_tokens) for t in before.turns]
        history = 0
        for turn, was, came_after in zip(after.turns, before.turns, [None, *before.turns], strict=False):
            assert 0 <= turn.kept_tokens <= history and turn.input_tokens >= 1
            if came_after and was.kept_tokens == came_after.context_tokens:
                assert turn.kept_tokens == history
            history = turn.context_tokens


def test_more_turns_than_the_window_has_tokens_are_refused():
    turns = (TurnSpec(10, 10, 1),) * 30
    with pytest.raises(TraceError, match="30 turns do not fit a context of 40 tokens"):
        scaled([Program("p", 0.0, turns), Program("q", 0.0, (TurnSpec(90, 90, 1),))], 40)


def test_poisson_arrivals_have_the_rate_and_the_spread_of_a_poisson_process():
    arrived = poisson_arrivals(generate("swe", 1, 1) * 4000, 2.0, 11)
    waits = np.diff([p.arrival_s for p in arrived])
    assert arrived[0].arrival_s == 0 and min(waits) >= 0
    assert waits.mean() == pytest.approx(0.5, rel=0.05)
    assert waits.std() == pytest.approx(0.5, rel=0.08)


def test_only_unknown_gaps_between_turns_are_drawn_and_they_are_counted():
    turns = (TurnSpec(9, 9, 1, gap_s=3.0), TurnSpec(12, 2, 1), TurnSpec(15, 2, 1))
    program = Program("p", 0.0, turns)
    assert unknown_gaps([program]) == 1
    (filled,) = with_gaps([program], lambda rng: 7.0 + rng.random(), 0)
    assert filled.turns[0].gap_s == 3.0 and 7 <= filled.turns[1].gap_s < 8 and filled.turns[2].gap_s is None
    assert (filled,) == with_gaps([program], lambda rng: 7.0 + rng.random(), 0)


def test_a_trace_without_arrivals_needs_a_rate(tmp_path):
    path = trace(tmp_path, LINE | {"arrival_s": 0}, LINE | {"arrival_s": 0, "program_id": "q"})
    with pytest.raises(TraceError, match="give --jps"):
        Selection(1, path).programs()
    assert [p.arrival_s > 0 for p in Selection(1, path, jps=1.0).programs()] == [False, True]


def test_recorded_arrivals_start_at_zero_in_order_and_scale_with_the_gaps(tmp_path):
    path = trace(tmp_path, LINE | {"arrival_s": 9.0}, LINE | {"arrival_s": 5.0, "program_id": "q"})
    chosen = Selection(1, path, time_scale=0.5).programs()
    assert [(p.program_id, p.arrival_s) for p in chosen] == [("q", 0.0), ("p", 2.0)]
