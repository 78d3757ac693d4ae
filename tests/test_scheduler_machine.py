"""Whatever clients, tiers and operators do, in any order: the books balance after every step.

    MACHINE_STEPS=1000000 python -m pytest tests/test_scheduler_machine.py     # or: make soak-machine

20,000 steps of the engine by default, in virtual time, on vLLM's own scheduler.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from bench import BLOCK, prompt
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from tier_bench import TierBench, check_books, check_pins
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from continuum_lmcache.vllm_plugin.scheduler import ContinuumAsyncScheduler, ContinuumScheduler

STEPS = int(os.environ.get("MACHINE_STEPS", "20000"))
RULES_A_RUN = 60
BLOCKS = 24
CONTEXT_TOKENS = (BLOCKS - 4) * BLOCK  # of one turn, at most
NAMES = st.sampled_from(["a", "b", "c", "d", None])
SALTS = st.sampled_from([None, "x", "y"])
POLICIES = st.sampled_from(["continuum", "static-ttl", "program-fcfs", "plas", "fcfs"])
CLASSES = st.sampled_from([ContinuumScheduler, ContinuumAsyncScheduler])

taken = {"steps": 0, "loads failed": 0, "preempted": 0}


class Machine(RuleBasedStateMachine):
    """One engine. Rules are what may happen to it between steps."""

    model: Path

    @initialize(cls=CLASSES, policy=POLICIES, loads_async=st.booleans(), tier_blocks=st.sampled_from([0, 12, 96]))
    def start(self, cls: Any, policy: str, loads_async: bool, tier_blocks: int) -> None:
        values = {"policy": policy, "static_ttl_s": 4, "max_pinned_share": 0.7, "max_tenant_share": 0.6}
        values |= {"max_wait_s": 20, "max_programs": 6, "program_idle_s": 60}
        os.environ.update({f"CONTINUUM_{name.upper()}": str(value) for name, value in values.items()})
        self.bench = TierBench(cls, self.model, BLOCKS, tier_blocks, loads_async)
        self.story: dict[Any, list[int]] = {}  # a program's tokens so far
        self.stories = 0

    @rule(
        job=NAMES,
        salt=SALTS,
        new=st.integers(1, 60),
        out=st.integers(1, 24),
        last=st.sampled_from([False, False, False, True]),
        stop=st.booleans(),
        anew=st.sampled_from([False, False, False, False, True]),
    )
    def arrive(
        self, job: str | None, salt: str | None, new: int, out: int, last: bool, stop: bool, anew: bool
    ) -> None:
        """A turn: its program's history and something new, or another conversation under the same name."""
        history = self.story.get((job, salt), [])
        if anew or len(history) + new + out > CONTEXT_TOKENS:
            history = []
        self.stories += 1
        tokens = history + prompt(new, self.stories)
        said = {"is_last_step": last, "stop": ["never"] if stop else None}
        self.bench.send(job, tokens, out, salt, **said)
        self.story[job, salt] = tokens + [7] * out

    @rule(steps=st.integers(1, 24), seconds=st.sampled_from([0.01, 0.1, 1.0]))
    def run(self, steps: int, seconds: float) -> None:
        for _ in range(steps):
            self.step(seconds)

    @rule(steps=st.integers(4, 40))
    def run_on(self, steps: int) -> None:
        for _ in range(steps):
            self.step(0.05)

    @rule(which=st.integers(0, 30))
    def abort(self, which: int) -> None:
        """A client leaves, or a stop string was found: both come as aborts."""
        live = [i for i, r in self.bench.scheduler.requests.items() if not r.is_finished()]
        if live:
            self.bench.scheduler.finish_requests(live[which % len(live)], RequestStatus.FINISHED_ABORTED)
            check_books(self.bench)

    @rule(loads=st.integers(1, 3))
    def loads_will_fail(self, loads: int) -> None:
        self.bench.failing = loads

    @rule(steps=st.integers(1, 6))
    def loads_take(self, steps: int) -> None:
        self.bench.load_steps = steps

    @rule()
    def lose_the_tiers(self) -> None:
        self.bench.scheduler.connector.reset_cache()

    @rule()
    def reset_the_cache(self) -> None:
        self.bench.scheduler.reset_prefix_cache()
        assert not self.bench.keeper.ledger.pinned
        check_books(self.bench)

    @rule()
    def reset_under_load(self) -> None:
        """Every running request is preempted; vLLM does not support it beside a load in flight."""
        self.drain_in_flight()
        if not self.bench.loading:
            self.bench.scheduler.reset_prefix_cache(reset_running_requests=True)
            assert self.bench.used_blocks == 0
            check_books(self.bench)

    @rule(state=st.sampled_from([PauseState.PAUSED_NEW, PauseState.PAUSED_ALL]), steps=st.integers(0, 6))
    def pause(self, state: PauseState, steps: int) -> None:
        self.bench.scheduler.set_pause_state(state)
        for _ in range(steps):
            self.step(0.5)
        self.bench.scheduler.set_pause_state(PauseState.UNPAUSED)

    @rule(seconds=st.sampled_from([3.0, 5.0, 100.0, 7200.0]))
    def time_passes(self, seconds: float) -> None:
        """The host slept, or nothing came; the alarm wakes the engine for what fell due."""
        self.bench.now_s += seconds
        self.step(0.01)

    def teardown(self) -> None:
        """Nobody waits for ever: once nothing more comes, all end, and all memory is back."""
        bench = getattr(self, "bench", None)
        if bench is None:
            return
        bench.failing = 0
        for _ in range(3000):
            if not bench.scheduler.requests and not bench._in_flight:
                break
            self.step(0.1)
        assert not bench.scheduler.requests, f"still here: {list(bench.scheduler.requests)}"
        bench.now_s += 10_000
        self.step(0.1)
        assert not bench.keeper.ledger.pinned and bench.used_blocks == 0
        assert not bench.keeper.turns and not bench.keeper._preempted and bench.keeper.waiting_turns == 0
        taken["loads failed"] += bench.failed
        taken["preempted"] += len(bench.preempted)
        bench.scheduler.shutdown()

    def drain_in_flight(self) -> None:
        """An engine awaits the steps under way before it resets."""
        while self.bench._in_flight:
            self.bench._deliver(*self.bench._in_flight.popleft())

    def step(self, seconds: float) -> None:
        taken["steps"] += 1
        self.bench.step(seconds)
        check_books(self.bench)


@pytest.mark.timeout(max(300, STEPS // 50))
def test_no_order_of_events_unbalances_the_books(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("CONTINUUM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CONTINUUM_POLICY", "continuum")  # so that what the machine sets is undone
    Machine.model = model
    per_run = RULES_A_RUN * 6
    while taken["steps"] < STEPS:
        examples = max(1, min(200, (STEPS - taken["steps"]) // per_run + 1))
        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=RULES_A_RUN,
                deadline=None,
                database=None,
                phases=[Phase.generate, Phase.shrink],
                suppress_health_check=list(HealthCheck),
            ),
        )
    print(taken)
    assert STEPS < 5000 or (taken["loads failed"] and taken["preempted"]), taken
