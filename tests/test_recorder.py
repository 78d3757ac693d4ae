"""The recorder: its events, their names in the file, and its bounds."""

import inspect
import json
import math
import re
import tracemalloc
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from continuum_lmcache.telemetry import events
from continuum_lmcache.telemetry.events import (
    Event,
    EvictFirst,
    PinReleased,
    PinTaken,
    ProgramEnded,
    TurnArrived,
    TurnFinished,
    TurnPreempted,
    TurnStarted,
)
from continuum_lmcache.telemetry.recorder import FORMAT, MAX_NAME_CHARS, META, EventRecorder
from continuum_lmcache.types import FinishedTurn, Pin, PinEnd, Place, ProgramId, Residency, Retention, TurnId

A, B = ProgramId("job-a"), ProgramId("job-b")
EPOCH_S = 1_000_000.0
KEEP = Retention(3.0, "cdf", 0.75, benefit_s=8.0, cost_s=3.0, samples=120, level="tool", policy="continuum")

ENDED = FinishedTurn(A, 1, ("pytest",), 1050, 66, Residency(0, 0, 0, 1050))


def run_turn(recorder: EventRecorder, program: ProgramId, turn: str, at_s: float, last: bool = False) -> None:
    """Arrive at `at_s`, start 0.5 s later, finish 2 s after that."""
    turn_id = TurnId(turn)
    recorder.record(TurnArrived(at_s, program, turn_id, 1000))
    recorder.record(
        TurnStarted(at_s + 0.5, program, turn_id, Residency(400, 300, 200, 1000), 0.5, evicted=True)
    )
    tool = ("pytest", "bash")
    finished = TurnFinished(at_s + 2.5, program, turn_id, tool, 1050, 50, last, KEEP, 0.75)
    recorder.record(replace(finished, place=Place(True, "slice", 20.0)))


def test_a_turn_is_recorded_under_the_prototypes_names_with_what_they_lacked() -> None:
    recorder = EventRecorder(EPOCH_S)
    run_turn(recorder, A, "t1", 10.0)
    recorder.record(PinTaken(12.5, A, Pin(A, range(66), 12.5, 15.5, KEEP, ENDED)))
    recorder.record(PinReleased(14.0, A, PinEnd.REUSED))
    recorder.record(ProgramEnded(20.0, A, 1))
    assert recorder.snapshot()[A] == [
        {"Request_arrival_time": 1_000_010.0, "turn": "t1", "prompt_length": 1000},
        {
            "waiting_to_running": 1_000_010.5,
            "turn": "t1",
            "prompt_length": 1000,
            "hit_length": 900,
            "gpu_tokens": 400,
            "dram_tokens": 300,
            "ssd_tokens": 200,
            "queue_delay_s": 0.5,
            "kv_evicted": True,
        },
        {
            "Request_departure_time": 1_000_012.5,
            "turn": "t1",
            "tool": ["pytest", "bash"],
            "context_tokens": 1050,
            "output_tokens": 50,
            "first_token_s": 0.75,
            "last": False,
            "retention": {
                "ttl_s": 3.0,
                "policy": "continuum",
                "reason": "cdf",
                "probability": 0.75,
                "benefit_s": 8.0,
                "cost_s": 3.0,
                "samples": 120,
                "level": "tool",
                "asks_again": False,
                "reload_s": 0.0,
            },
            "place": {"kept": True, "reason": "slice"},
        },
        {"pinned_time": 1_000_012.5, "deadline": 1_000_015.5, "ttl_s": 3.0, "blocks": 66},
        {"unpinned_time": 1_000_014.0, "outcome": "reused"},
        {"ended_time": 1_000_020.0},
    ]


def test_a_preempted_turn_resumes_under_the_prototypes_name() -> None:
    recorder, turn, served = EventRecorder(EPOCH_S), TurnId("t1"), Residency(0, 0, 0, 10)
    recorder.record(TurnArrived(0.0, A, turn, 10))
    recorder.record(TurnStarted(1.0, A, turn, served, 1.0))
    recorder.record(TurnPreempted(2.0, A, turn))
    recorder.record(TurnStarted(3.0, A, turn, served, 3.0, resumed=True))
    assert [next(iter(event)) for event in recorder.snapshot()[A]] == [
        "Request_arrival_time",
        "waiting_to_running",
        "Request_evicted_from_running_queue_time",
        "evicted_to_running",
    ]


def test_the_snapshot_does_not_change_when_the_run_goes_on() -> None:
    recorder = EventRecorder(EPOCH_S)
    run_turn(recorder, A, "t1", 0.0)
    before = recorder.snapshot()
    kept = json.dumps(before)
    run_turn(recorder, A, "t2", 10.0)
    assert json.dumps(before) == kept


def test_numbers_that_json_lacks_become_null() -> None:
    recorder = EventRecorder(EPOCH_S)
    forever = Retention(math.inf, "", benefit_s=math.nan)
    recorder.record(TurnArrived(0.0, A, TurnId("t"), 1))
    recorder.record(TurnFinished(1.0, A, TurnId("t"), (), 1, 0, False, forever))
    recorder.record(PinTaken(1.0, A, Pin(A, range(1), 1.0, math.inf, forever, ENDED)))
    text = json.dumps(recorder.snapshot(), allow_nan=False)
    assert '"ttl_s": null' in text and '"benefit_s": null' in text and '"deadline": null' in text


def test_the_oldest_events_go_first_and_their_program_says_how_many() -> None:
    recorder = EventRecorder(EPOCH_S, max_events=4)
    run_turn(recorder, A, "t1", 0.0)
    run_turn(recorder, B, "t1", 10.0)
    found = recorder.snapshot()
    assert found[META][0]["dropped"] == 2
    assert [next(iter(event)) for event in found[A]] == ["Request_departure_time", "events_dropped"]
    assert found[A][-1] == {"events_dropped": 2} and len(found[B]) == 3


def test_a_program_that_returns_after_its_events_were_dropped_does_not_look_complete() -> None:
    recorder = EventRecorder(EPOCH_S, max_events=3)
    for at_s, program in enumerate((A, B, A)):
        run_turn(recorder, program, f"t{at_s}", 10.0 * at_s)
    assert recorder.snapshot().keys() == {META, A}
    assert [event.get("turn") for event in recorder.snapshot()[A]] == ["t2", "t2", "t2", None]
    assert recorder.snapshot()[A][-1] == {"events_dropped": 3}


def test_ten_thousand_programs_take_the_memory_of_the_bound() -> None:
    recorder = EventRecorder(EPOCH_S, max_events=300)
    tracemalloc.start()
    for number in range(10_000):
        run_turn(recorder, ProgramId(f"job-{number}"), "t1", float(number))
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(recorder.snapshot()) == 1 + 100
    assert held_bytes < 300 * 1_800


programs = st.sampled_from([ProgramId(name) for name in "abcdef"])
steps = st.lists(st.tuples(programs, st.sampled_from(["arrive", "preempt", "end"])), max_size=60)


@given(steps, st.integers(1, 12))
def test_every_event_is_either_held_or_counted(taken: list[tuple[ProgramId, str]], max_events: int) -> None:
    recorder = EventRecorder(EPOCH_S, max_events=max_events)
    for now_s, (program, what) in enumerate(taken):
        if what == "arrive":
            recorder.record(TurnArrived(now_s, program, TurnId(f"t{now_s}"), 1))
        elif what == "preempt":
            recorder.record(TurnPreempted(now_s, program, TurnId("t")))
        else:
            recorder.record(ProgramEnded(now_s, program, 1))
    found = recorder.snapshot()
    dropped = found.pop(META)[0]["dropped"]
    held = [event for events in found.values() for event in events if "events_dropped" not in event]
    assert len(held) + dropped == len(taken) and len(held) <= max_events


names = st.text(st.characters(), min_size=0, max_size=8) | st.sampled_from(
    [META, f"_{META}", META[1:], "null", "\x1b[2J", "\u2028", "\ud800", "a" * 10_000, "a" * 9_999 + "b"]
)


@given(st.lists(names, unique=True, max_size=12), st.booleans())
def test_any_id_is_safe_in_json_bounded_and_its_own(ids: list[str], hash_ids: bool) -> None:
    recorder = EventRecorder(EPOCH_S, hash_ids=hash_ids)
    for number, name in enumerate(ids):
        recorder.record(TurnArrived(float(number), ProgramId(name), TurnId(name), number))
    text = json.dumps(recorder.snapshot())
    found = json.loads(text)
    assert text.isascii() and text.isprintable()
    assert found.pop(META)[0]["format"] == FORMAT
    assert [events[0]["prompt_length"] for events in found.values()] == list(range(len(ids)))
    assert all(len(name) <= MAX_NAME_CHARS + 17 for name in found)


def test_every_event_is_recorded_but_the_eviction_of_a_last_turns_kv() -> None:
    recorder = EventRecorder(EPOCH_S)
    recorder.record(EvictFirst(2.0, A, TurnId("t"), 0))
    assert list(recorder.snapshot()) == [META]
    kinds = {
        name for name, kind in vars(events).items() if isinstance(kind, type) and issubclass(kind, Event)
    }
    recorded = set(re.findall(r"case events\.(\w+)", inspect.getsource(EventRecorder.record)))
    assert kinds - recorded == {"Event", "TurnEvent", "EvictFirst"}


def test_hashed_ids_do_not_reveal_the_name_and_agree_under_one_salt() -> None:
    def told(salt: bytes) -> str:
        recorder = EventRecorder(EPOCH_S, hash_ids=True, salt=salt)
        run_turn(recorder, ProgramId("alice@example.org"), "chatcmpl-alice", 0.0)
        return json.dumps(recorder.snapshot())

    assert "alice" not in told(b"one")
    assert told(b"one") == told(b"one") != told(b"two")
