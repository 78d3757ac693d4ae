"""A program's standing is its own, not a request's: a turn that is sent again waits as if it had stayed.

Every state in which a client may give up, on vLLM's own scheduler, in virtual time, beside new programs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench import Bench, prompt
from tier_bench import TierBench
from vllm.v1.request import RequestStatus

from continuum_lmcache.programs.program import Stage
from continuum_lmcache.vllm_plugin.scheduler import ContinuumScheduler

BLOCKS = 64
PROGRAMS = 14  # three or four fit
LIMIT_S = 600.0
UNDER_WAY_S = 20.0  # two turns of the crowd: memory that others have taken meanwhile


class Crowd:
    """New programs of three turns come all the time."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.sent = bench, 0
        self.live: dict[str, tuple[str, int, list[int]]] = {}

    def step(self) -> None:
        bench = self.bench
        for name, (request_id, left, tokens) in list(self.live.items()):
            if request_id not in bench.scheduler.requests:
                said = bench.done.get(request_id, tokens) + prompt(16, 60 + left)
                self.live[name] = (bench.send(name, said, 60), left - 1, said)
                if left == 1:
                    del self.live[name]
        while len(self.live) < PROGRAMS:
            self.sent += 1
            story = prompt(180, 100 + self.sent)
            self.live[f"new{self.sent}"] = (bench.send(f"new{self.sent}", story, 60), 3, story)
        bench.step()

    def run(self, seconds: float) -> None:
        until_s = self.bench.now_s + seconds
        while self.bench.now_s < until_s:
            self.step()


class Agent:
    """One client, whose program has a name, a hint, or neither."""

    def __init__(self, bench: Bench, kind: str, stop: bool) -> None:
        self.bench, self.name = bench, "agent" if kind == "named" else None
        self.fields = {"continuum_hint": "agent"} if kind == "hint" else {}
        self.stop, self.story = ["</end"] if stop else None, prompt(150, 1)
        for turn in range(3):
            said = bench.turn(self.name, self.story, out=8, stop=self.stop, **self.fields)
            self.story = said + prompt(20, 50 + turn)
            bench.now_s += 1.0

    def send(self, out: int = 400) -> str:
        return self.bench.send(self.name, self.story, out, stop=self.stop, **self.fields)


def in_line(bench: Bench, crowd: Crowd, agent: Agent) -> str:
    bench.advance(100.0)  # nobody expects it any more
    crowd.run(30.0)
    sent = agent.send()
    crowd.run(1.0)
    assert bench.engine.turns[sent].program.stage is Stage.IN_LINE
    return sent


def queued(bench: Bench, crowd: Crowd, agent: Agent) -> str:
    bench.scheduler._events.release_all_pins(bench.now_s)
    crowd.run(5.0)
    sent = agent.send()
    crowd.run(0.3)
    assert bench.engine.turns[sent].program.stage is Stage.ACTIVE and sent not in bench.order
    return sent


def loading(bench: Bench, crowd: Crowd, agent: Agent) -> str:
    assert isinstance(bench, TierBench)
    bench.scheduler._events.release_all_pins(bench.now_s)
    bench.scheduler.reset_prefix_cache()
    bench.load_steps = 30
    sent = agent.send()
    for _ in range(10):
        bench.step()
    assert bench.scheduler.requests[sent].status == RequestStatus.WAITING_FOR_REMOTE_KVS
    crowd.run(0.3)
    return sent


def running(bench: Bench, crowd: Crowd, agent: Agent) -> str:
    sent = agent.send()
    crowd.run(10.0)
    assert sent in bench.order and sent in bench.scheduler.requests
    return sent


def between_turns(bench: Bench, crowd: Crowd, agent: Agent) -> str:
    """Its client did not get the answer."""
    sent = agent.send(out=8)
    while sent in bench.scheduler.requests:
        crowd.step()
    return sent


stayed_s: dict[tuple[Any, str, float], float] = {}  # the waits of turns that nobody sent again
STATES = [in_line, queued, loading, running, between_turns]


def wait_s(bench: Bench, state: Callable[..., str], agent: Agent, ends: str, pause_s: float) -> float:
    """How long the turn that is sent again waits; without an end, the one that stayed from then on."""
    crowd = Crowd(bench)
    sent = state(bench, crowd, agent)
    if ends == "aborted" and sent in bench.scheduler.requests:
        bench.scheduler.finish_requests(sent, RequestStatus.FINISHED_ABORTED)
    crowd.run(pause_s)
    if not ends and state is between_turns:  # its client got the answer
        agent.story = bench.done[sent] + prompt(20, 60)
    again = agent.send() if ends or state is between_turns else sent
    begin_s = bench.now_s
    while again not in bench.order and bench.now_s < begin_s + LIMIT_S:
        crowd.step()
    return bench.now_s - begin_s


@pytest.mark.parametrize("pause_s", [1.0, 60.0], ids=["a second", "a minute"])
@pytest.mark.parametrize("ends", ["aborted", "kept alive"])
@pytest.mark.parametrize("stop", [False, True], ids=["", "stop strings"])
@pytest.mark.parametrize("kind", ["named", "linked", "hint"])
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_a_turn_that_is_sent_again_waits_no_longer_than_if_it_had_stayed(
    model: Path, settings: Any, state: Any, kind: str, stop: bool, ends: str, pause_s: float
) -> None:
    settings(policy="continuum")

    def wait(stop: bool, ends: str) -> float:
        if state is loading:
            bench: Bench = TierBench(ContinuumScheduler, model, BLOCKS, tier_blocks=4 * BLOCKS)
        else:
            bench = Bench(ContinuumScheduler, model, BLOCKS, 256)
        return wait_s(bench, state, Agent(bench, kind, stop), ends, pause_s)

    if (state, kind, pause_s) not in stayed_s:
        stayed_s[state, kind, pause_s] = wait(False, "")
    again_s = wait(stop, ends)
    assert again_s <= stayed_s[state, kind, pause_s] + UNDER_WAY_S


def test_a_turn_that_is_aborted_again_and_again_is_one_programs(model: Path, settings: Any) -> None:
    """Without a name; and as a second conversation under a name, which goes on from an older turn of it."""
    settings(policy="continuum")
    bench = Bench(ContinuumScheduler, model, BLOCKS, 256)

    def new_programs(name: str | None, tokens: list[int]) -> int:
        before = len(bench.engine.programs.records)
        for _ in range(3):
            sent = bench.send(name, tokens, 40)
            for _ in range(5):
                bench.step()
            bench.scheduler.finish_requests(sent, RequestStatus.FINISHED_ABORTED)
            bench.now_s += 2.0
        bench.turn(name, tokens, out=5)
        return len(bench.engine.programs.records) - before

    assert new_programs(None, bench.turn(None, prompt(150, 1), out=5) + prompt(20, 2)) == 1
    said = bench.turn("everybody", prompt(150, 3), out=5)
    bench.turn("everybody", prompt(100, 3) + prompt(40, 4), out=5)
    assert new_programs("everybody", said + prompt(20, 5)) == 1
