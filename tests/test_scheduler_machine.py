"""After any events of clients, tiers and operators, in any order, the tables balance after every step.

    MACHINE_STEPS=1000000 python -m pytest -s tests/test_scheduler_machine.py     # or: make soak-machine

12,000 steps of the engine by default, in virtual time, on vLLM's own scheduler; others by --hypothesis-seed.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
from bench import BLOCK, prompt
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from layer_kinds import GEMMA, QWEN3_NEXT, WINDOW
from tier_bench import TierBench, check_books
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from continuum_lmcache import engine
from continuum_lmcache.programs.program import Stage
from continuum_lmcache.vllm_plugin.scheduler import ContinuumAsyncScheduler, ContinuumScheduler
from experiments.policies import setting

STEPS = int(os.environ.get("MACHINE_STEPS", "12000"))
RULES_A_RUN = 60
STEPS_A_RUN = 250  # at least, in the mean of some dozens: 300 to 370
SETTINGS = {
    "static_ttl_s": 4,
    "max_pinned_share": 0.7,
    "max_tenant_share": 0.6,
    "longest_wait_s": 20,
    "pin_reclaim_after_s": 20,
    "program_idle_s": 60,
}
BLOCKS = 24
CONTEXT_TOKENS = (BLOCKS - 4) * BLOCK  # of one turn, at most
RARELY = st.integers(0, 7).map(lambda n: n == 7)
TURN = st.fixed_dictionaries(
    {
        "job": st.sampled_from(["a", "b", "c", "d", None]),
        "salt": st.sampled_from([None, None, "x"]),
        "new": st.integers(1, 90),
        "out": st.integers(1, 40),
        "is_last_step": RARELY,
        "stop": st.sampled_from([None, ["never"]]),
        "anew": RARELY,
    }
)
POLICIES = ("continuum", "static-ttl", "program-fcfs", "continuum", "static-ttl", "plas", "fcfs")
CLASSES = st.sampled_from([ContinuumScheduler, ContinuumAsyncScheduler])

COMMON = ("failed loads", "preempted", "yielded", "held by admission") + tuple(
    f"pins {outcome}" for outcome in ("reused", "expired", "reclaimed", "reset")
)

taken: Counter[str] = Counter()


class Machine(RuleBasedStateMachine):
    """One engine. Rules are events between steps."""

    model: ClassVar[Path]

    @initialize(
        cls=CLASSES,
        tier_blocks=st.sampled_from([0, 12, 96]),
        groups=st.sampled_from([None, None, None, None, GEMMA, QWEN3_NEXT, [WINDOW]]),
    )
    def start(self, cls: Any, tier_blocks: int, groups: Any) -> None:
        blocks = BLOCKS + 10 * len(groups) if groups else BLOCKS  # the longest turn fits
        self.bench = TierBench(cls, self.model, blocks, tier_blocks, groups)
        self.story: dict[Any, list[int]] = {}  # a program's tokens so far
        self.stories = 0

    @rule(turns=st.lists(TURN, min_size=1, max_size=4), failing=st.sampled_from([0, 0, 2]))
    def arrive(self, turns: list[dict[str, Any]], failing: int = 0) -> None:
        """Of the loads that follow, the next `failing` fail too."""
        self.bench.failing += failing
        for turn in turns:
            self.send(**turn)

    @rule(turns=st.lists(TURN, min_size=1, max_size=3), steps=st.integers(1, 12))
    def arrive_and_run(self, turns: list[dict[str, Any]], steps: int) -> None:
        self.arrive(turns)
        self.run(steps, 0.05)

    @rule(steps=st.integers(1, 30), seconds=st.sampled_from([0.01, 0.1, 0.5]))
    def run(self, steps: int, seconds: float) -> None:
        for _ in range(steps):
            self.step(seconds)

    @rule(which=st.integers(0, 30))
    def abort(self, which: int) -> None:
        """A client leaves, or a stop string was found: both come as aborts."""
        live = [i for i, r in self.bench.scheduler.requests.items() if not r.is_finished()]
        if live:
            self.bench.scheduler.finish_requests(live[which % len(live)], RequestStatus.FINISHED_ABORTED)
            check_books(self.bench)

    @rule(
        what=st.sampled_from(["lost", "reset", "reset-busy", "sleep", "fail", "slow"]),
        loads=st.integers(1, 5),
    )
    def trouble(self, what: str, loads: int) -> None:
        """A tier is emptied, a cache reset, the engine put to sleep; loads fail or take longer."""
        scheduler = self.bench.scheduler
        if what == "lost":
            scheduler.reset_connector_cache()
        elif what == "reset":
            scheduler.reset_prefix_cache()
        elif what == "reset-busy":
            self.reset_under_load()
        elif what == "sleep":
            self.pause(PauseState.PAUSED_ALL, 2)
            scheduler.reset_prefix_cache()
        elif what == "fail":
            self.bench.failing = loads
        else:
            self.bench.load_steps = loads
        check_books(self.bench)

    @rule(state=st.sampled_from([PauseState.PAUSED_NEW, PauseState.PAUSED_ALL]), steps=st.integers(0, 6))
    def pause(self, state: PauseState, steps: int) -> None:
        self.bench.scheduler.set_pause_state(state)
        for _ in range(steps):
            self.step(0.5)
        self.bench.scheduler.set_pause_state(PauseState.UNPAUSED)

    @rule(seconds=st.sampled_from([3.0, 5.0, 100.0, 7200.0]))
    def time_passes(self, seconds: float) -> None:
        """The host slept, or nothing came; the timer wakes the engine for due deadlines."""
        self.bench.now_s += seconds
        self.step(0.01)

    def send(self, job: str | None, salt: str | None, new: int, out: int, **said: Any) -> None:
        """A turn: its program's history and something new, or another conversation under the same name."""
        history = self.story.get((job, salt), [])
        if said.pop("anew") or len(history) + new + out > CONTEXT_TOKENS:
            history = []
        self.stories += 1
        tokens = history + prompt(new, self.stories)
        self.bench.send(job, tokens, out, salt, **said)
        self.story[job, salt] = tokens + [7] * out

    def reset_under_load(self) -> None:
        """Every running request is preempted; vLLM does not support it beside a load, ended or not."""
        bench = self.bench
        while bench._in_flight:  # an engine awaits the steps under way before it resets
            bench._deliver(*bench._in_flight.popleft())
        running = {request.request_id for request in bench.scheduler.running}
        managers = bench.scheduler.kv_cache_manager.coordinator.single_type_managers
        if {i for m in managers for i, blocks in m.req_to_blocks.items() if blocks} <= running:
            bench.scheduler.reset_prefix_cache(reset_running_requests=True)
            assert bench.used_blocks == 0

    def teardown(self) -> None:
        """No request waits for ever: without new ones all end, and all memory is free again."""
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
        assert not bench.engine.pins.pinned and bench.used_blocks == 0
        assert not bench.engine.turns and not bench.engine.turns.preempted
        assert not bench.engine.admission.is_waited_for
        outcomes = {f"pins {outcome.value}": n for outcome, n in bench.engine.pins.outcomes.items()}
        taken.update({"failed loads": bench.failed, "preempted": len(bench.preempted), **outcomes})
        bench.scheduler.shutdown()

    def step(self, seconds: float) -> None:
        taken["steps"] += 1
        self.bench.step(seconds)
        taken["yielded"] += self.bench.engine.programs.in_stage[Stage.YIELDED]
        taken["held by admission"] += self.bench.engine.admission.is_waited_for
        check_books(self.bench)


@pytest.mark.hypothesis
@pytest.mark.timeout(max(900, STEPS // 50))
def test_no_order_of_events_unbalances_the_books(
    model: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue("settings")(**SETTINGS)
    monkeypatch.setattr(engine, "MOST_PROGRAMS", 6)
    Machine.model = model
    logging.getLogger("vllm").setLevel(logging.ERROR)
    first_seed = int(request.config.getoption("--hypothesis-seed") or 0)
    rounds = max(1, STEPS // 100_000)  # more calls for long runs: one call's runs are much alike
    for number in itertools.count():
        if number >= len(POLICIES) and taken["steps"] >= STEPS:
            break
        monkeypatch.setenv("CONTINUUM_POLICY", setting(POLICIES[number % len(POLICIES)]))
        seed(first_seed + number)(Machine)
        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=max(2, STEPS // STEPS_A_RUN // len(POLICIES) // rounds),
                stateful_step_count=RULES_A_RUN,
                deadline=None,
                database=None,
                phases=[Phase.generate],  # shrinking takes minutes; a failure prints its own events
                suppress_health_check=list(HealthCheck),
            ),
        )
    print(dict(taken))
    assert STEPS < 12_000 or all(taken[event] for event in COMMON), taken
