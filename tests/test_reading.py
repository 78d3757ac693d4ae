"""Recordings read back: overlapping turns, several ranks, malformed files; and figures checked by hand."""

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import EPOCH_S, KEEP, Run, recording, saved, written

from continuum_lmcache.engine import BEHIND
from continuum_lmcache.errors import TraceError
from continuum_lmcache.policy.continuum import ALL_WAIT_ALIKE, gives_up_place, may_start
from continuum_lmcache.recordings.figures import figures, spread, summary
from continuum_lmcache.recordings.reader import WHY, load, story
from continuum_lmcache.telemetry.events import (
    PinRenewed,
    ProgramAdmitted,
    ProgramEnded,
    ProgramHeld,
    TurnArrived,
    TurnFinished,
)
from continuum_lmcache.telemetry.recorder import META, Event, EventRecorder
from continuum_lmcache.types import PinEnd, Place, ProgramId, Start, TurnId


def two_programs() -> EventRecorder:
    """Job a: 0 to 10 s, two turns, a pin reused after 2 s. Job b: 1 to 5 s, one turn, a pin that expires."""
    run = Run()
    run.turn("a", "a1", (0, 1, 4), prompt_tokens=100, keep=KEEP)
    run.turn("b", "b1", (1, 3, 5), prompt_tokens=200, keep=KEEP)
    run.unpinned(6, "a", PinEnd.REUSED)
    run.turn("a", "a2", (6, 6, 10), prompt_tokens=200, served=(90, 30, 20), tool=("pytest", "bash"))
    run.recorder.record(PinRenewed(7, ProgramId("b"), 8))
    run.unpinned(8, "b", PinEnd.EXPIRED)
    run.recorder.record(ProgramEnded(10, ProgramId("a"), 2))
    return run.recorder


def test_the_figures_of_a_small_run_are_those_computed_by_hand(tmp_path: Path) -> None:
    """Job times 10 and 4 s: mean 7, P95 = 4 + 0.95 * 6. First tokens 0.5 s after waits of 1, 2 and 0 s."""
    found = figures(load(written(tmp_path, two_programs())))
    assert (found["programs"], found["programs_complete"], found["turns"], found["seconds"]) == (2, 2, 3, 10)
    times = {"mean": 7, "median": 7, "p95": 9.7, "p99": 9.94, "max": 10}
    assert found["job_time_s"] == pytest.approx(times)
    assert found["first_token_s"]["first turns"]["mean"] == 2
    assert found["first_token_s"]["later turns"]["max"] == 0.5
    assert found["queue_wait_s"]["max"] == 2
    assert found["prompt_tokens"] == {"GPU": 90, "DRAM": 30, "disk": 20, "computed": 360}
    assert found["pins"] == {"taken": 2, "reused": 1}
    assert found["pins_by_outcome"] == {"reused": 1, "expired": 1}
    assert (found["start"], found["policy"]) == ("Mon, 21 Sep 2026 14:13:20 GMT", "continuum")


def test_the_summary_says_what_ran_and_what_came_of_it(tmp_path: Path) -> None:
    assert summary(load(written(tmp_path, two_programs()))) == (
        "2 programs with 3 turns ran on Llama (policy continuum, 1 x H100, vLLM 0.32.0) from "
        "Mon, 21 Sep 2026 14:13:20 GMT, for 10 s. A program took 7 s on average, 10 s at most. "
        "First tokens of first turns came after 2 s in the median, 2.45 s for the slowest twentieth. "
        "First tokens of later turns came after 0.5 s in the median, 0.5 s for the slowest twentieth. "
        "Prompt tokens by the source of their KV: 18% GPU, 6% DRAM, 4% disk, 72% computed. "
        "Pins: 2 taken, 1 reused."
    )


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40))
def test_ranks_lie_between_the_least_and_the_most(values: list[float]) -> None:
    found = spread(values)
    ranks = [found[name] or 0.0 for name in ("median", "p95", "p99", "max")]
    assert min(values) <= ranks[0] * (1 + 1e-9) and ranks == pytest.approx(sorted(ranks))


def test_a_directory_gives_the_same_as_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, two_programs())
    assert figures(load(tmp_path)) == figures(load(file))


def test_ranks_of_one_run_are_read_together(tmp_path: Path) -> None:
    """The program's second turn went to the other engine."""
    for rank, starts_s in ((0, (0, 10)), (1, (4,))):
        run = Run()
        for at_s in starts_s:
            run.turn("a", f"t{at_s}", (at_s, at_s, at_s + 1))
        written(tmp_path, run.recorder, rank)
    (program,) = load(tmp_path).programs
    assert [t.gap_s for t in program.turns] == [3, 5, None]


def test_turns_of_one_program_may_overlap_and_finish_out_of_order(tmp_path: Path) -> None:
    """a1 runs 0 to 5, a2 inside it from 1 to 3; then nothing until a3 at 9: one gap, of 4 s, after a1."""
    recorder, a = EventRecorder(EPOCH_S), ProgramId("a")
    recorder.record(TurnArrived(0.0, a, TurnId("a1"), 100))
    recorder.record(TurnArrived(1.0, a, TurnId("a2"), 50))
    recorder.record(TurnFinished(3.0, a, TurnId("a2"), ("second",), 60, 11, False, KEEP))
    recorder.record(TurnFinished(5.0, a, TurnId("a1"), ("first",), 110, 22, False, KEEP))
    recorder.record(TurnArrived(9.0, a, TurnId("a3"), 300))
    run = load(written(tmp_path, recorder))
    first, second, third = run.turns
    assert (first.tool, first.output_tokens, first.gap_s) == ("first", 22, 4)
    assert (second.tool, second.output_tokens, second.gap_s) == ("second", 11, None)
    assert third.departure_s is None and not run.programs[0].complete


def test_unfinished_and_cut_programs_have_no_job_time(tmp_path: Path) -> None:
    run = Run()
    run.recorder = EventRecorder(EPOCH_S, max_events=5)
    for at_s in (0, 100):
        run.turn("cut", f"t{at_s}", (at_s, at_s, at_s + 1))
    run.recorder.record(TurnArrived(200.0, ProgramId("running"), TurnId("t"), 1))
    seen = load(written(tmp_path, run.recorder))
    found = figures(seen)
    assert (found["programs"], found["programs_complete"], found["job_time_s"]["mean"]) == (2, 0, None)
    assert "2 of them did not end in it" in summary(seen) and "oldest 2 events" in summary(seen)
    assert found["first_token_s"]["first turns"]["max"] is None, "of a cut program the first is not known"


ARRIVAL: Event = {"Request_arrival_time": 1.0, "turn": "t", "prompt_length": 9}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"a": [{"Request_arr', "not JSON"),
        ("[1, 2]", "expected an object of event lists by program"),
        (json.dumps(recording({"a": {"Request_arrival_time": 1}})), "program 'a' is not a list"),
        (json.dumps(recording({"a": [7]})), "program 'a', event 1: 7 is not an event"),
        (
            json.dumps(recording({"a": [ARRIVAL, {"pinned_time": "now", "blocks": 1}]})),
            "event 2: pinned_time",
        ),
        (json.dumps(recording({"a": [{**ARRIVAL, "prompt_length": None}]})), "event 1: TypeError("),
        (json.dumps(recording({"a": [{"Request_arrival_time": 1}]})), "event 1: KeyError('prompt_length')"),
        (json.dumps(recording({"a": [{"Request_arrival_time": 1e400}]})), "Infinity is no number of JSON"),
        (
            json.dumps({META: [{"format": 99, "dropped": 0}], "a": [ARRIVAL]}),
            "format 99, and this version reads",
        ),
        (json.dumps({"a": [ARRIVAL]}), "format None, and this version reads"),
        (json.dumps(recording({})), "no program arrived"),
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


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
times = ("Request_arrival_time", "waiting_to_running", "Request_departure_time", "pinned_time", "lost_time")
read = (
    "turn",
    "prompt_length",
    "gpu_tokens",
    "output_tokens",
    "first_token_s",
    "tool",
    "retention",
    "blocks",
)
field_names = st.sampled_from([*times, *read, "events_dropped", "cause", "lost_tokens", "model"])
events = st.dictionaries(field_names, st.floats(0, 9) | st.integers(0, 9) | json_values, max_size=5)
kinds = st.sampled_from(
    [
        ARRIVAL,
        {"waiting_to_running": 2.0, "turn": "t", "prompt_length": 9}
        | {"gpu_tokens": 4, "dram_tokens": 0, "ssd_tokens": 9},
        {"Request_departure_time": 3.0, "turn": "t", "output_tokens": 1, "first_token_s": None}
        | {"tool": [], "retention": None},
    ]
)


@settings(max_examples=300)
@given(
    st.dictionaries(st.sampled_from(["a", "b", "null"]), st.lists(events | kinds, max_size=6), max_size=3),
    st.dictionaries(field_names, json_values, max_size=2),
)
def test_any_json_is_either_measured_or_refused(tmp_path_factory: Any, jobs: Any, header: Any) -> None:
    path = saved(tmp_path_factory.mktemp("any"), recording(jobs, **header))
    try:
        summary(load(path))
    except TraceError as refused:
        assert path.name in str(refused)


def test_a_programs_story_says_in_a_sentence_why_it_waited_and_why_it_kept_its_place(tmp_path: Path) -> None:
    recorder, a, first = EventRecorder(0.0), ProgramId("a"), ProgramId("first")
    turn, place = TurnId("a1"), Place(False, "slice-over", 20.0)
    recorder.record(TurnArrived(1e9, a, turn, 100))
    recorder.record(ProgramHeld(1e9, a, turn, Start(False, "behind"), first))
    recorder.record(ProgramHeld(1e9 + 20, a, turn, Start(False, "no-room", 12_000, 3_400)))
    recorder.record(ProgramAdmitted(1e9 + 50, a, turn, Start(True, "room", 12_000, 13_000)))
    recorder.record(TurnFinished(1e9 + 60, a, turn, (), 110, 10, False, KEEP, place=place))
    file = tmp_path / "scheduler_timestamps"
    file.write_text(json.dumps(recorder.snapshot()))
    _, behind, room, starts, ends = story(file, "a")
    assert behind.endswith("It waits for its turn in the line, behind first.")
    assert room.endswith("It waits for room: it would need 12,000 tokens, and 3,400 are left.")
    assert starts.endswith("It starts: it fits beside the programs with a place.")
    assert ends.endswith("It gives its place up: its slice is over, and a turn would wait for too long.")


def test_each_reason_of_the_policy_for_a_start_or_a_place_has_its_sentence() -> None:
    source = "".join(map(inspect.getsource, (may_start, gives_up_place)))
    given = {
        *re.findall(r'(?:reason = |Place\(\w+, |Start\(\w+, )"([a-z-]+)"', source),
        ALL_WAIT_ALIKE,
        BEHIND.reason,
    }
    assert given == {reason for _, reason in WHY}
