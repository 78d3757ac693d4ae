"""No client waits for ever, whatever the others send. On vLLM's own scheduler, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench import Bench, prompt
from vllm.v1.core.sched.scheduler import Scheduler

from continuum_lmcache.telemetry.events import TurnFinished
from continuum_lmcache.vllm_plugin.scheduler import ContinuumScheduler

POLICIES = ["continuum", "static-ttl"]


@pytest.fixture
def make(model: Path, settings: Any) -> Callable[..., Bench]:
    def build(blocks: int, scheduler: Any = ContinuumScheduler, **values: Any) -> Bench:
        settings(**values)
        return Bench(scheduler, model, blocks, 256)

    return build


def longest_wait_s(bench: Bench, name: str | None, seconds: float = 100.0) -> float:
    """Of an agent's turns, beside 16 requests of one name, each sent again as it ends; 4 fit at once."""
    start_s, live, sent, waits_s = bench.now_s, set[str](), 0, [0.0]
    turn, sent_s, due_s = "", 0.0, bench.now_s + 5
    while bench.now_s - start_s < seconds:
        live &= set(bench.scheduler.requests)
        while len(live) < 16:
            sent += 1
            live.add(bench.send(name, prompt(200, 10 + sent % 997), 40, is_last_step=False))
        if not turn and bench.now_s >= due_s:
            turn, sent_s = bench.send("agent", prompt(200, 3), 8), bench.now_s
        bench.step()
        if turn:
            waits_s[-1] = bench.now_s - sent_s
            if turn not in bench.scheduler.requests:
                turn, due_s = "", bench.now_s + 2
                waits_s.append(0.0)
    return max(waits_s)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_name_that_many_turns_share_takes_one_place_in_the_queue(make: Any, policy: str) -> None:
    """A gateway's constant session id, or a client that means harm."""
    stock = longest_wait_s(make(64, Scheduler), None)
    assert longest_wait_s(make(64, policy=policy), "everybody") < 1.5 * stock


def test_no_turn_waits_longer_than_the_gauges_bound_though_older_programs_never_pause(make: Any) -> None:
    bench = make(64, policy="continuum")
    stories = {f"old{n}": prompt(20, n) for n in range(12)}
    for name, story in stories.items():
        bench.turn(name, story)
    bench.turn("agent", prompt(20, 90))
    bench.advance(70.0)
    live = {name: bench.send(name, prompt(240, n), 40) for n, name in enumerate(stories)}
    for _ in range(10):
        bench.step()
    sent_s, sent = bench.now_s, bench.send("agent", prompt(240, 90), 8)
    bound_s = bench.engine.admission.longest_wait_s
    while sent not in bench.order and bench.now_s - sent_s < 10 * bound_s:
        for n, (name, request_id) in enumerate(live.items()):
            if request_id not in bench.scheduler.requests:
                live[name] = bench.send(name, prompt(240, n), 40)
        bench.step()
    assert bench.now_s - sent_s < bound_s + 60, "the rest: turns under way"


def test_of_the_answers_to_one_prompt_one_is_the_programs_turn(make: Any) -> None:
    """n = 4, a list of prompts, or a group of samples."""
    bench = make(60)
    bench.turn("agent", prompt(64, 1), out=4)
    bench.now_s += 3
    for out in (9, 2, 5, 7):
        bench.send("agent", prompt(80, 1), out)
    bench.run_until_idle()
    assert [event.program for event in bench.events_of(TurnFinished)] == ["agent", "agent"]
    assert bench.engine.programs.records["agent"].turns == 2
    assert bench.engine.learned.gaps.exact(()).n == 1, "the gap before them, and none between them"
    assert list(bench.engine.pins.pinned) == ["agent"]


def test_conversations_that_share_a_name_are_told_apart_by_their_prompts(make: Any) -> None:
    bench = make(60)
    bench.send("everybody", prompt(20, 9), out=200)
    stories = [prompt(64, n) for n in range(3)]
    for _ in range(3):
        sent = [bench.send("everybody", story, out=20) for story in stories]
        while not set(sent) <= set(bench.done):
            bench.step()
        stories = [bench.done[request_id] + prompt(20, n) for n, request_id in enumerate(sent)]
    assert len(bench.engine.programs.records) == 1 + 3
    assert len(bench.engine.pins.pinned) == 3
