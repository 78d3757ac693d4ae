"""How long does schedule() take on this machine, with so many turns running, waiting and pinned?

Real time, so no two runs agree; take the median, and compare contenders that were timed together.
"""

from __future__ import annotations

import gc
import statistics
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from continuum_lmcache.baselines import static_ttl
from continuum_lmcache.orders import by_pin
from continuum_lmcache.policies import POLICIES, Policy
from experiments.sim.clock import VirtualClock, virtual_time
from experiments.sim.serving import Setup, build_scheduler
from experiments.sim.step_time import MACHINES
from experiments.sim.streams import block_hasher
from experiments.sweep.cases import ON_DEMAND, Bench, SweepError
from experiments.sweep.simulated import policy_of

PROMPT_TOKENS = 4096  # of turns that run or lie pinned
BLOCKED_TOKENS = 40_000  # of turns that wait: more than is left free
MAX_MODEL_LEN = 50_000
BLOCK_TOKENS = 16  # vLLM's default
OUTPUT_TOKENS = 4096  # more than the rounds
WARM_UP_ROUNDS = 5


def measure(bench: Bench) -> dict[str, Any]:
    """Median and 95th percentile of a decode step's schedule(), in microseconds."""
    clock = VirtualClock()
    with ExitStack() as until:
        POLICIES[ON_DEMAND] = Policy(static_ttl, by_pin, beyond=True)
        until.callback(POLICIES.pop, ON_DEMAND)
        until.enter_context(virtual_time(clock))
        rig = Rig(bench, clock, until)
        rig.fill()
        durations_us = [rig.step_us() for _ in range(bench.rounds + WARM_UP_ROUNDS)][WARM_UP_ROUNDS:]
    ordered = sorted(durations_us)
    return {
        "schedule_median_us": statistics.median(ordered),
        "schedule_p95_us": ordered[int(0.95 * (len(ordered) - 1))],
        "measured": True,
    }


class Rig:
    """A scheduler with full queues, and a runner that says one token to everybody."""

    def __init__(self, bench: Bench, clock: VirtualClock, until: ExitStack) -> None:
        self.bench, self.clock = bench, clock
        grown = PROMPT_TOKENS + bench.rounds + WARM_UP_ROUNDS + 8 * BLOCK_TOKENS
        kv_tokens = bench.pinned_programs * (PROMPT_TOKENS + BLOCK_TOKENS) + bench.running_turns * 2 * grown
        setup = Setup(
            policy=policy_of(bench.contender),
            tiers={"dram_gb": 0.0},  # for all alike: the policies keep their settings there
            machine=replace(MACHINES["h200"], kv_tokens=kv_tokens),
            step_tokens=8192,
            max_seqs=1024,
            block_tokens=BLOCK_TOKENS,
            skip_blocked=False,  # what a server does
            continuum={"static_ttl_s": 1e6, "max_ttl_s": 1e6, "max_pinned_share": 1.0},
        )
        self.scheduler: Any = build_scheduler(setup, clock, MAX_MODEL_LEN, until)
        self.hasher = block_hasher(BLOCK_TOKENS)
        until.callback(self.scheduler.shutdown)

    def fill(self) -> None:
        """Pin, then run, then let wait: the lab's machine has room for one after the other."""
        for i in range(self.bench.pinned_programs):
            self._send(f"pinned-{i}", 1, i + 1, last=False)
            while self.scheduler.requests:
                self._step()
        for i in range(self.bench.running_turns):
            self._send(f"running-{i}", OUTPUT_TOKENS, 10_000 + i)
        while len(self.scheduler.running) < self.bench.running_turns or self._prefilling():
            self._step()
        self._use_up()
        for i in range(self.bench.waiting_turns):
            self._send(f"waiting-{i}", OUTPUT_TOKENS, 20_000 + i, prompt_tokens=BLOCKED_TOKENS)
        self._check()

    def _use_up(self) -> None:
        """Leave free what the running turns will grow into, so that the waiting ones stay there."""
        pool = self.scheduler.kv_cache_manager.block_pool
        needs = self.bench.running_turns * ((self.bench.rounds + WARM_UP_ROUNDS) // BLOCK_TOKENS + 2)
        pool.get_new_blocks(max(0, pool.get_num_free_blocks() - needs))

    def _check(self) -> None:
        keeper = getattr(self.scheduler, "_keeper", None)
        pinned = len(keeper.ledger.pinned) if keeper else 0
        if pinned != self.bench.pinned_programs:
            raise SweepError(
                f"{self.bench.contender} holds {pinned} pins where {self.bench.pinned_programs} were asked "
                "for; time pins with static-ttl"
            )

    def step_us(self) -> float:
        """One step; how long its schedule() took."""
        self.clock.advance_to(self.clock.now_s + 0.01)
        gc.collect(0)
        start_ns = time.perf_counter_ns()
        output = self.scheduler.schedule()
        took_ns = time.perf_counter_ns() - start_ns
        self._answer(output)
        return took_ns / 1e3

    def _step(self) -> None:
        self.clock.advance_to(self.clock.now_s + 1.0)  # so that whoever waits at our door comes in
        self._answer(self.scheduler.schedule())

    def _prefilling(self) -> bool:
        return any(r.is_prefill_chunk for r in self.scheduler.running)

    def _answer(self, output: SchedulerOutput) -> None:
        ids = list(output.num_scheduled_tokens)
        said = [[] if self.scheduler.requests[i].is_prefill_chunk else [1] for i in ids]
        index = {request_id: at for at, request_id in enumerate(ids)}
        self.scheduler.update_from_output(output, ModelRunnerOutput(ids, index, said))

    def _send(
        self, name: str, outputs: int, stream: int, *, last: bool = True, prompt_tokens: int = PROMPT_TOKENS
    ) -> None:
        says = {"job_id": name, "is_last_step": last, "this_func_call": "bash"}
        params = SamplingParams(max_tokens=outputs, ignore_eos=True, extra_args=says)
        request = Request(
            request_id=name,
            prompt_token_ids=[stream] * prompt_tokens,
            sampling_params=params,
            pooling_params=None,
            arrival_time=self.clock.now_s,
            block_hasher=self.hasher,
        )
        self.scheduler.add_request(request)
