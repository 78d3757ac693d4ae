"""No client waits for ever, whatever the others send. On vLLM's own scheduler, in virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench import Bench, prompt
from tier_bench import TierBench
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

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


@pytest.mark.parametrize("name", ["new", None])
@pytest.mark.parametrize("old", [str, lambda _: None], ids=["named", "linked"])
def test_turns_that_run_and_are_aborted_and_sent_again_bar_nobodys_way(
    make: Any, old: Any, name: str | None
) -> None:
    """Their clients give up before an answer is whole."""
    bench = make(64, policy="continuum", longest_wait_s=30)
    stories = {n: bench.turn(old(n), prompt(150, n), 5) + prompt(45, 50 + n) for n in range(6)}
    start_s, sent_s, sent, live = bench.now_s, math.inf, "", dict[int, tuple[str, float]]()
    while sent not in bench.order and bench.now_s < start_s + 300:
        for n, story in stories.items():
            request_id, until_s = live.get(n, ("", math.inf))
            if request_id in bench.order and until_s == math.inf:
                live[n] = request_id, bench.now_s + 5
            elif not request_id or bench.now_s >= until_s:
                bench.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
                live[n] = bench.send(old(n), story, 400), math.inf
        if not sent and bench.now_s >= start_s + 20:
            sent_s, sent = bench.now_s, bench.send(name, prompt(200, 90), 8)
        bench.step()
    assert bench.now_s - sent_s < 30 + 20, "the rest: turns under way"


def test_turns_that_are_aborted_while_they_load_and_sent_again_bar_nobodys_way(
    model: Path, settings: Any
) -> None:
    settings(policy="continuum", longest_wait_s=10)
    bench = TierBench(ContinuumScheduler, model, 64, tier_blocks=512)
    stories = {f"old{n}": bench.turn(f"old{n}", prompt(150, n), 5) + prompt(45, 50 + n) for n in range(6)}
    bench.scheduler.reset_prefix_cache()
    bench.load_steps = 30
    start_s, sent_s, sent, live = bench.now_s, math.inf, "", dict[str, str]()
    while sent not in bench.order and bench.now_s < start_s + 100:
        for n, (name, story) in enumerate(stories.items()):
            request = bench.scheduler.requests.get(live.get(name, ""))
            loads = request is not None and request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            if loads and round(bench.now_s * 10) % 10 == n:
                bench.scheduler.finish_requests(live[name], RequestStatus.FINISHED_ABORTED)
            if not loads and (request is None or request.is_finished()):
                live[name] = bench.send(name, story, 400)
        if not sent and bench.now_s >= start_s + 5:
            sent_s, sent = bench.now_s, bench.send("new", prompt(200, 90), 8)
        bench.step()
    assert bench.now_s - sent_s < 10 + 20, "the rest: turns under way"


@pytest.mark.parametrize("name", ["new", None])
def test_turns_that_are_sent_again_beside_their_own_lost_requests_bar_nobodys_way(
    make: Any, name: str | None
) -> None:
    """A proxy keeps what the clients have given up, so each sending is one request more."""
    bench = make(64, policy="continuum", longest_wait_s=30)
    stories = {f"old{n}": bench.turn(f"old{n}", prompt(150, n), 5) + prompt(45, 50 + n) for n in range(3)}
    start_s, sent_s, sent, sendings = bench.now_s, math.inf, "", 0
    while sent not in bench.order and bench.now_s < start_s + 300:
        if bench.now_s >= start_s + 3 * sendings:
            sendings += 1
            for old, story in stories.items():
                bench.send(old, story, 100)
        if not sent and bench.now_s >= start_s + 20:
            sent_s, sent = bench.now_s, bench.send(name, prompt(200, 90), 8)
        bench.step()
    assert bench.now_s - sent_s < 30 + 20, "the rest: turns under way"


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
