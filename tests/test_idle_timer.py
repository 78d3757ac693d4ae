"""An idle engine sleeps until the next pin expires, and no longer."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import pytest
from bench import prompt
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc

from continuum_lmcache.vllm_plugin.hooks import idle_timer
from continuum_lmcache.vllm_plugin.scheduler import LONGEST_SLEEP_S


class Engine(EngineCoreProc):
    """Only what vLLM's idle loop uses."""

    def __init__(self, idle_s: Any) -> None:
        self.scheduler: Any = SimpleNamespace(idle_s=idle_s)
        self.input_queue = queue.Queue()
        self.aborts_queue = queue.Queue()
        self.process_input_queue_block = True
        self.handled: list[Any] = []

    def has_work(self) -> bool:
        return bool(self.handled)

    def is_running(self) -> bool:
        return True

    def _notify_idle_state_callbacks(self) -> None:
        """Nobody waits for it."""

    def _handle_client_request(self, request_type: EngineCoreRequestType, request: Any) -> None:
        self.handled.append((request_type, request))


@pytest.fixture(autouse=True)
def installed() -> None:
    idle_timer.install()


@pytest.mark.parametrize("idle_s", [0.0, 0.05])
def test_an_idle_engine_goes_on_to_a_step_when_a_pin_is_due(idle_s: float) -> None:
    engine = Engine(lambda: idle_s)
    for _ in range(3):
        engine._process_input_queue()
    assert not engine.handled


@pytest.mark.parametrize("idle_s", [None, LONGEST_SLEEP_S])
def test_an_engine_that_sleeps_is_woken_by_a_request(idle_s: float | None) -> None:
    engine = Engine(lambda: idle_s)
    wakes = [(EngineCoreRequestType.WAKEUP, None), (EngineCoreRequestType.ABORT, ["a"])]
    for wake in wakes:
        engine.input_queue.put(wake)
    engine._process_input_queue()
    assert engine.handled == wakes


def test_another_scheduler_keeps_vllms_own_queue() -> None:
    engine = Engine(None)
    engine.handled.append("work")
    engine._process_input_queue()
    assert "get" not in vars(engine.input_queue)


def test_the_scheduler_lets_the_engine_sleep_until_its_next_pin_is_due(make: Any) -> None:
    bench = make(policy="static-ttl", static_ttl_s=4.0)
    scheduler = bench.scheduler
    assert scheduler.idle_s() is None
    bench.turn("p", prompt(64))
    left_s = scheduler.next_due_s() - bench.now_s
    assert scheduler.idle_s() == left_s > 0
    bench.now_s += left_s + 1
    assert scheduler.idle_s() == 0 and scheduler.has_requests()
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert scheduler.idle_s() is None and not scheduler.has_requests(), "else it would spin"
    scheduler.set_pause_state(PauseState.UNPAUSED)
    bench.run_until_idle()
    assert scheduler.idle_s() is None


def test_a_deadline_further_away_than_a_thread_can_wait_for_is_waited_for_in_parts(make: Any) -> None:
    bench = make(policy="static-ttl", static_ttl_s=1e300, max_ttl_s=1e300)
    bench.turn("p", prompt(64))
    assert bench.scheduler.idle_s() == LONGEST_SLEEP_S
