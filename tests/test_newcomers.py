"""No load holds the line's door shut: a new program waits for no longer than the gauge said when it came.

On vLLM's own scheduler, in virtual time, beside every kind of request that does not end in a tool call.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench import Bench, prompt
from tier_bench import TierBench
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from continuum_lmcache.vllm_plugin.scheduler import ContinuumScheduler

BLOCKS = 64  # four contexts of 240 tokens
CLIENTS = 8
LIMIT_S = 900.0


class Load:
    """CLIENTS clients that send again as soon as they are answered: `source` sends for one of them."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.sent = 0
        self.live: dict[int, list[str]] = {}

    def step(self, source: Callable[[Load, int], list[str]]) -> None:
        for client in range(CLIENTS):
            if not any(i in self.bench.scheduler.requests for i in self.live.get(client, ())):
                self.sent += 1
                self.live[client] = source(self, client)
        self.bench.step()

    def send(self, job: str | None, out: int = 40, tokens: int = 200, **fields: Any) -> str:
        return self.bench.send(job, prompt(tokens, 10 + self.sent % 997), out, **fields)


def single(load: Load, _: int) -> list[str]:
    return [load.send(None)]


def last_step(load: Load, _: int) -> list[str]:
    return [load.send(f"once{load.sent}", is_last_step=True)]


def one_token(load: Load, _: int) -> list[str]:
    return [load.send(None, out=1)]


def several_answers(load: Load, client: int) -> list[str]:
    """n = 3 under one name."""
    return [load.send(f"group{client}") for _ in range(3)]


def aborted(load: Load, client: int) -> list[str]:
    """The client leaves after some steps, and sends something else."""
    for request_id in load.live.get(client, ()):
        load.bench.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
    return [load.send(None, out=40 if client % 2 else 400)]


def linked(load: Load, client: int) -> list[str]:
    """Every other prompt continues the one before."""
    said = load.bench.done.get(load.live[client][0]) if load.sent % 2 and load.live.get(client) else None
    if said is None or len(said) > 260:
        return [load.send(None, out=30)]
    return [load.bench.send(None, said + prompt(10, load.sent), 30)]


SOURCES = [single, last_step, one_token, several_answers, aborted, linked]


def agents(load: Load, stories: dict[int, list[int]], live: dict[int, tuple[str, float]]) -> None:
    """Three agents of long runs, with a tool of a second."""
    bench = load.bench
    for n in range(3):
        request_id, due_s = live.get(n, ("", 0.0))
        if request_id in bench.scheduler.requests or bench.now_s < due_s:
            continue
        if request_id in bench.done:
            stories[n] = bench.done.pop(request_id)[:170] + prompt(12, bench.order.index(request_id))
            live[n] = ("", bench.now_s + 1.0)
            continue
        live[n] = (bench.send(f"agent{n}", stories.setdefault(n, prompt(150, 900 + n)), 12), 0.0)


def newcomers_wait_s(bench: Bench, source: Any, has_agents: bool, name: str = "new") -> tuple[float, float]:
    """And the gauge's value when it came; inf under vLLM's own scheduler."""
    load, stories, live = Load(bench), dict[int, list[int]](), dict[int, tuple[str, float]]()
    begin_s = bench.now_s
    while bench.now_s < begin_s + 20:
        if has_agents:
            agents(load, stories, live)
        load.step(source)
    sent_s, sent = bench.now_s, bench.send(name, prompt(200, 3), 8)
    gauge_s = bench.engine.admission.longest_wait_s if bench.engine else float("inf")
    while sent not in bench.order and bench.now_s < sent_s + LIMIT_S:
        if has_agents:
            agents(load, stories, live)
        load.step(source)
    return bench.now_s - sent_s, gauge_s


@pytest.mark.parametrize("has_agents", [False, True], ids=["alone", "beside agents"])
@pytest.mark.parametrize("tier", [False, True], ids=["no tier", "tier"])
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
def test_a_new_program_waits_no_longer_than_the_gauge_says_whatever_others_send(
    model: Path, settings: Any, source: Any, tier: bool, has_agents: bool
) -> None:
    """Beside vLLM's own queue, in which it stands after the line: as long as with vLLM's own scheduler."""
    settings(policy="continuum")

    def bench(scheduler: Any) -> Bench:
        if tier:
            return TierBench(scheduler, model, BLOCKS, tier_blocks=2 * BLOCKS)
        return Bench(scheduler, model, BLOCKS, 256)

    stock_s, _ = newcomers_wait_s(bench(Scheduler), source, has_agents)
    wait_s, gauge_s = newcomers_wait_s(bench(ContinuumScheduler), source, has_agents)
    assert wait_s <= gauge_s + stock_s
    if not has_agents and source not in (several_answers, linked):  # nobody has a place
        assert wait_s <= 1.5 * stock_s + 5
