"""ThunderAgent's gate: who passes, who waits for room, and who gives it up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from experiments.sim.clock import Timetable, VirtualClock
from experiments.sim.gate import BACKSTOP_S, IDLE_LEASE_S, Gate
from experiments.sweep.cases import GATE, SessionPoint
from experiments.sweep.closed_loop import run


class Rig:
    """A gate for 100 tokens, and what passed."""

    def __init__(self) -> None:
        self.clock, self.timetable, self.passed = VirtualClock(), Timetable(), list[str]()
        self.turns: dict[str, int] = {}
        self.gate = Gate(
            100, self.clock, self.timetable, lambda request: self.passed.append(request.request_id)
        )

    def ask(self, session: str, tokens: int) -> None:
        """The session's next turn, with a prompt of so many tokens and an answer of one."""
        number = self.turns[session] = self.turns.get(session, 0) + 1
        params = SamplingParams(max_tokens=1, extra_args={"job_id": session})
        request = Request(f"{session}{number}", [1] * tokens, params, None, arrival_time=self.clock.now_s)
        self.gate.arrive(request)

    def answer(self, session: str) -> None:
        name = f"{session}{self.turns[session]}"
        self.gate.heard(SimpleNamespace(request_id=name, finish_reason="length"))

    def wait(self, seconds: float) -> None:
        end_s = self.clock.now_s + seconds
        while self.timetable.next_s <= end_s:
            self.clock.advance_to(self.timetable.next_s)
            self.timetable.run_due(self.clock.now_s)
        self.clock.advance_to(end_s)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_new_session_waits_until_there_is_room(rig: Rig) -> None:
    for session in "abc":
        rig.ask(session, 40)
    assert rig.passed == ["a1", "b1"]
    rig.answer("a")
    rig.wait(IDLE_LEASE_S - 1)
    assert rig.passed == ["a1", "b1"], "a may come back"
    rig.wait(1)
    assert rig.passed == ["a1", "b1", "c1"]


def test_a_session_that_is_not_paused_passes_at_once(rig: Rig) -> None:
    for session in "abc":
        rig.ask(session, 40)
    rig.answer("a")
    rig.ask("a", 90)
    assert rig.passed == ["a1", "b1", "a2"]


def test_paused_sessions_go_before_new_ones(rig: Rig) -> None:
    rig.ask("a", 60)
    rig.answer("a")
    rig.wait(IDLE_LEASE_S)
    rig.ask("b", 80)  # a is paused
    rig.ask("c", 60)
    rig.ask("a", 70)
    rig.answer("b")
    rig.wait(IDLE_LEASE_S)
    assert rig.passed == ["a1", "b1", "a2"]


def test_the_longest_idle_session_is_paused_and_none_in_vain(rig: Rig) -> None:
    for session in "ab":
        rig.ask(session, 40)
    rig.answer("a")
    rig.wait(1)
    rig.answer("b")
    rig.wait(IDLE_LEASE_S)
    rig.ask("d", 101)  # never fits
    assert not any(session.is_paused for name, session in rig.gate.sessions.items() if name in "ab")
    rig.gate.close()
    rig.ask("c", 50)
    assert rig.passed == ["a1", "b1", "c1"]
    assert rig.gate.sessions["a"].is_paused and not rig.gate.sessions["b"].is_paused


def test_who_has_waited_for_half_an_hour_passes_without_room(rig: Rig) -> None:
    rig.ask("a", 90)
    rig.ask("b", 90)
    rig.wait(BACKSTOP_S - 1)
    assert rig.passed == ["a1"]
    rig.wait(1)
    assert rig.passed == ["a1", "b1"]


def test_sessions_play_behind_the_gate_and_leave_nothing_behind() -> None:
    point = SessionPoint(GATE, 24, 1, "trace:claude-code-swe:fitted", "a100", counted_s=60.0, warm_up_turns=2)
    found = run(point)
    assert found["turns"] > 0 and found["tokens_per_s"] > 0
