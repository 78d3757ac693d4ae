"""The timer that wakes an idle engine."""

from __future__ import annotations

import queue
import time

import pytest

pytest.importorskip("vllm")

from waiting import PATIENCE_S, wait_for

from continuum_lmcache.vllm_plugin.hooks import idle_timer
from continuum_lmcache.vllm_plugin.hooks.idle_timer import IdleTimer


class Clock:
    """A clock that the test sets, and how often it was read."""

    now_s, reads = 0.0, 0

    def monotonic(self) -> float:
        self.reads += 1
        return self.now_s


@pytest.mark.parametrize("times", [(0.02,), (600.0, 0.02), (0.02, 0.04), (None, 0.02), (0.02, None, 0.04)])
def test_an_alarm_rings_at_the_time_that_was_set_last(
    times: tuple[float | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, rung = Clock(), queue.Queue[float]()
    monkeypatch.setattr(idle_timer, "time", clock)
    alarm = IdleTimer(lambda: rung.put(clock.now_s))
    for at_s in times:
        alarm.set(at_s)
    last_s = times[-1]
    assert last_s is not None
    clock.now_s = last_s - 0.01
    already = clock.reads
    wait_for(lambda: clock.reads >= already + 2)  # its thread has compared the two times
    with alarm._changed:
        assert rung.empty()
        clock.now_s = last_s
    assert rung.get(timeout=PATIENCE_S) == last_s
    assert rung.empty()
    alarm.close()


def test_a_deadline_further_away_than_a_thread_can_wait_for_ends_no_timer() -> None:
    rung: queue.Queue[None] = queue.Queue()
    alarm = IdleTimer(lambda: rung.put(None))
    alarm.set(1e300)
    alarm.set(time.monotonic() + 0.01)
    rung.get(timeout=PATIENCE_S)
    alarm.set(1e300)
    alarm._thread.join(0.1)
    assert alarm._thread.is_alive()
    alarm.close()


def test_an_alarm_that_rang_can_be_set_again() -> None:
    rung: queue.Queue[None] = queue.Queue()
    alarm = IdleTimer(lambda: rung.put(None))
    for _ in range(3):
        alarm.set(time.monotonic() + 0.01)
        rung.get(timeout=PATIENCE_S)
    alarm.set(None)
    alarm.close()
    assert rung.empty()
