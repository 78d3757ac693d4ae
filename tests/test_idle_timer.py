"""The timer that wakes an idle engine."""

from __future__ import annotations

import queue
import time

import pytest

pytest.importorskip("vllm")

from continuum_lmcache.vllm_plugin.hooks.idle_timer import IdleTimer


@pytest.mark.parametrize("times", [(0.02,), (60.0, 0.02), (0.02, 0.04), (None, 0.02), (0.02, None, 0.04)])
def test_an_alarm_rings_at_the_time_that_was_set_last(times: tuple[float | None, ...]) -> None:
    rung: queue.Queue[float] = queue.Queue()
    alarm = IdleTimer(lambda: rung.put(time.monotonic()))
    now_s = time.monotonic()
    for after_s in times:
        alarm.set(None if after_s is None else now_s + after_s)
    assert times[-1] is not None
    assert rung.get(timeout=30) >= now_s + times[-1]
    assert rung.empty()
    alarm.close()


def test_an_alarm_that_rang_can_be_set_again() -> None:
    rung: queue.Queue[None] = queue.Queue()
    alarm = IdleTimer(lambda: rung.put(None))
    for _ in range(3):
        alarm.set(time.monotonic() + 0.01)
        rung.get(timeout=30)
    alarm.set(None)
    alarm.close()
    assert rung.empty()
