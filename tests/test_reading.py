"""Recordings read back: overlapping turns, several ranks, the prototype's file, malformed ones."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import EPOCH_S, KEEP, PROTOTYPE, Run, printed, saved, written

from continuum_lmcache.errors import TraceError
from continuum_lmcache.recordings.metrics import measure, predictions
from continuum_lmcache.recordings.program_history import KINDS
from continuum_lmcache.recordings.reader import FIELD_TYPES, load
from continuum_lmcache.telemetry.events import TurnArrived, TurnFinished, TurnStarted
from continuum_lmcache.telemetry.recorder import META, Event, EventRecorder
from continuum_lmcache.types import ProgramId, Residency, TurnId
from continuum_lmcache.vllm_plugin.files.recording_files import RecordingWriter
from experiments.recorded_runs import to_trace


def test_a_directory_gives_the_same_as_the_file(tmp_path: Path) -> None:
    run = Run()
    recording = RecordingWriter(tmp_path, run.recorder)
    run.turn("a", "a1", (0, 1, 4), keep=KEEP)
    run.turn("a", "a2", (6, 6, 10))
    recording.flush()
    (file,) = tmp_path.iterdir()
    assert measure(load(tmp_path)) == measure(load(file))


def test_ranks_of_one_run_are_read_together(tmp_path: Path) -> None:
    """The program's second turn went to the other engine."""
    for rank, starts_s in ((0, (0, 10)), (1, (4,))):
        run = Run()
        recording = RecordingWriter(tmp_path, run.recorder, rank=rank)
        for at_s in starts_s:
            run.turn("a", f"t{at_s}", (at_s, at_s, at_s + 1))
        recording.flush()
    (program,) = load(tmp_path).programs
    assert [t.gap_s for t in program.turns] == [3, 5, None]


def test_turns_of_one_program_may_overlap_and_finish_out_of_order(tmp_path: Path) -> None:
    """a1 runs 0 to 5, a2 inside it from 1 to 3; then nothing until a3 at 9: one gap, of 4 s, after a1."""
    recorder = EventRecorder(EPOCH_S)
    a = ProgramId("a")
    for at_s, turn in ((0.0, "a1"), (1.0, "a2")):
        recorder.record(TurnArrived(at_s, a, TurnId(turn), 100 if turn == "a1" else 50))
        recorder.record(
            TurnStarted(at_s, a, TurnId(turn), Residency(0, 0, 0, 100 if turn == "a1" else 50), 0.0, False)
        )
    recorder.record(TurnFinished(3.0, a, TurnId("a2"), ("second",), 60, 11, False, KEEP))
    recorder.record(TurnFinished(5.0, a, TurnId("a1"), ("first",), 110, 22, False, KEEP))
    recorder.record(TurnArrived(9.0, a, TurnId("a3"), 300))
    run = load(written(tmp_path, recorder))
    first, second, third = run.turns
    assert (first.tool, first.output_tokens, first.gap_s) == (("first",), 22, 4)
    assert (second.tool, second.output_tokens, second.gap_s) == (("second",), 11, None)
    assert third.departure_s is None and not run.programs[0].complete
    assert [w.watched_s for w in predictions(run)] == [4]


def test_a_turn_that_arrives_while_another_runs_ends_no_gap(tmp_path: Path) -> None:
    recorder, a = EventRecorder(EPOCH_S), ProgramId("a")
    recorder.record(TurnArrived(0.0, a, TurnId("long"), 1))
    recorder.record(TurnArrived(1.0, a, TurnId("short"), 1))
    recorder.record(TurnFinished(2.0, a, TurnId("short"), (), 1, 1, False, None))
    recorder.record(TurnArrived(3.0, a, TurnId("next"), 1))
    assert [t.gap_s for t in load(written(tmp_path, recorder)).turns] == [None, None, None]


def test_unfinished_and_cut_programs_do_not_count_as_fast_ones(tmp_path: Path) -> None:
    recorder = EventRecorder(EPOCH_S, max_events_per_program=3)
    for at_s in (0.0, 100.0):
        recorder.record(TurnArrived(at_s, ProgramId("cut"), TurnId(f"t{at_s}"), 1))
        recorder.record(TurnFinished(at_s + 1, ProgramId("cut"), TurnId(f"t{at_s}"), (), 1, 1, False, None))
    recorder.record(TurnArrived(0.0, ProgramId("running"), TurnId("t"), 1))
    found = measure(load(written(tmp_path, recorder)))
    assert (found["programs"], found["programs complete"], found["JCT, mean [s]"]) == (2, 0, None)


def test_a_program_whose_beginning_was_discarded_has_no_job_time(tmp_path: Path) -> None:
    run = Run()
    run.recorder = EventRecorder(EPOCH_S, max_programs=1)
    for name, at_s in (("long", 0), ("other", 10), ("long", 600)):
        run.turn(name, f"{name}-{at_s}", (at_s, at_s, at_s + 1))
    found = measure(load(written(tmp_path, run.recorder)))
    assert (found["programs"], found["programs complete"], found["JCT, mean [s]"]) == (1, 0, None)


def test_the_prototypes_own_file_is_read_and_what_it_lacks_is_listed(tmp_path: Path) -> None:
    run = load(saved(tmp_path, PROTOTYPE))
    found = measure(run)
    assert found["JCT, mean [s]"] == 7
    assert found["queue wait, mean [s]"] == 1
    assert found["cache hit ratio"] == 0.5
    assert found["  dram part"] is None
    assert found["pin time, sum [s]"] == 1
    assert found["preemptions"] == 1
    assert [t.gap_s for t in run.turns] == [1, None]
    notes = printed("report", tmp_path)
    for word in (
        "output_tokens: no trace",
        "retention",
        "split by tier",
        "tool",
        "outcome",
        "without a job_id",
    ):
        assert word in notes, word


def test_events_without_a_turns_id_go_to_the_earliest_turn_that_lacks_them(tmp_path: Path) -> None:
    names = ["Request_arrival_time"] * 2 + ["waiting_to_running"] * 2 + ["Request_departure_time"] * 2
    run = load(saved(tmp_path, {"a": [{name: float(at_s)} for at_s, name in enumerate(names)]}))
    assert [(t.arrival_s, t.started_s, t.departure_s) for t in run.turns] == [(0, 2, 4), (1, 3, 5)]


def test_the_prototypes_file_cannot_become_a_trace_and_the_error_says_why(tmp_path: Path) -> None:
    said = printed("convert", saved(tmp_path, PROTOTYPE), tmp_path / "trace.jsonl", status=1)
    assert "turns carry no prompt_length and output_tokens" in said
    assert not (tmp_path / "trace.jsonl").exists()


ARRIVAL: Event = {"Request_arrival_time": 1.0}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"a": [{"Request_arr', "not JSON"),
        ("[1, 2]", "expected an object of event lists by program"),
        ('{"a": {"Request_arrival_time": 1}}', "program 'a' is not a list"),
        ('{"a": [7]}', "program 'a', event 1: 7 is not an event"),
        (
            json.dumps({"a": [ARRIVAL, {"waiting_to_running": "soon"}]}),
            "program 'a', event 2: waiting_to_running",
        ),
        ('{"a": [{"Request_arrival_time": NaN}]}', "nan; it must be a number"),
        (json.dumps({"a": [{**ARRIVAL, "prompt_length": None}]}), "prompt_length is None"),
        (json.dumps({"a": [{**ARRIVAL, "tool": "ls"}]}), "tool is 'ls'; it must be a list of names"),
        (json.dumps({"a": [{**ARRIVAL, "retention": {"ttl_s": 1}}]}), "with ttl_s and probability"),
        (json.dumps({"a": [{**ARRIVAL, "turn": [1]}]}), "turn is [1]; it must be text"),
        (json.dumps({META: [{"format": 99}], "a": [ARRIVAL]}), "format 99; this reads format 1"),
        ("{}", "nothing to analyse"),
        ("[" * 100_000, "not JSON"),
        ("", "not JSON"),
    ],
)
def test_a_malformed_file_is_one_error_with_place_and_reason(
    tmp_path: Path, content: str, words: str
) -> None:
    path = tmp_path / "scheduler_timestamps"
    path.write_text(content)
    with pytest.raises(TraceError) as refused:
        load(path)
    assert words in str(refused.value) and str(path) in str(refused.value)
    said = printed("report", path, status=1)
    assert said.startswith("error: ") and "Traceback" not in said


def test_a_directory_without_a_recording_is_refused(tmp_path: Path) -> None:
    assert "no recording here" in printed("report", tmp_path, status=1)
    assert "no recording here" in printed("report", tmp_path / "missing", status=1)


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
field_names = st.sampled_from(sorted({*KINDS, *FIELD_TYPES, "format", "deadline"}))
events = st.dictionaries(field_names, st.floats(0, 9) | st.integers(0, 9) | json_values, max_size=4)


@settings(max_examples=300)
@given(
    jobs=st.dictionaries(st.sampled_from(["a", "b", META, "null"]), st.lists(events, max_size=6), max_size=3)
)
def test_any_json_is_either_measured_or_refused(tmp_path_factory: Any, jobs: Any) -> None:
    path = saved(tmp_path_factory.mktemp("any"), jobs)
    try:
        run = load(path)
        measure(run)
        to_trace(run)
    except TraceError as refused:
        assert path.name in str(refused)
