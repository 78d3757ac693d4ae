"""Times a step of the scheduler on this machine, by the number of running, waiting and pinned turns.

CPU time of the thread: other processes do not add to it, but slow it down, so runs differ. Contenders are
compared by `experiments.overhead`, which keeps them all in one process and lets their steps alternate.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from continuum_lmcache.retention.baselines import static_ttl
from continuum_lmcache.retention.policies import POLICIES, Policy
from continuum_lmcache.retention.queue_order import pinned_first
from experiments.sim.clock import VirtualClock, virtual_time
from experiments.sim.serving import Setup, build_scheduler
from experiments.sim.step_time import MACHINES
from experiments.sim.streams import block_hasher
from experiments.sweep.cases import ON_DEMAND, SweepError
from experiments.sweep.simulated import policy_of

PROMPT_TOKENS = 4096  # of turns that run or lie pinned
BLOCKED_TOKENS = 20_000  # of turns that wait: more than is ever left free
MAX_MODEL_LEN = 50_000
BLOCK_TOKENS = 16  # vLLM's default
OUTPUT_TOKENS = 4096  # more than the rounds
WARM_UP_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Bench:
    """schedule() of a real scheduler, timed with this many running, waiting and pinned turns."""

    contender: str
    running_turns: int
    waiting_turns: int
    pinned_programs: int
    rounds: int


@dataclass(frozen=True, slots=True)
class StepCost:
    """The time of one step in the engine's loop, in microseconds."""

    schedule_us: float
    update_us: float  # update_from_output(), without the statistics that it asks for
    stats_us: float  # make_stats()

    @property
    def whole_us(self) -> float:
        return self.schedule_us + self.update_us + self.stats_us


def timed_us(call: Callable[[], Any]) -> tuple[float, Any]:
    """The thread's CPU time of one call, and its answer."""
    start_ns = time.thread_time_ns()
    found = call()
    return (time.thread_time_ns() - start_ns) / 1e3, found


@contextmanager
def shared_clock() -> Iterator[tuple[VirtualClock, ExitStack]]:
    """One virtual time for all contenders, and the stack that closes at its end."""
    clock = VirtualClock()
    with ExitStack() as until:
        POLICIES[ON_DEMAND] = Policy(static_ttl, pinned_first, has_extensions=True)
        until.callback(POLICIES.pop, ON_DEMAND)
        until.enter_context(virtual_time(clock))
        yield clock, until


@contextmanager
def timed_schedulers(*benches: Bench) -> Iterator[list[TimedScheduler]]:
    """Schedulers with full queues, in one virtual time, as many as are to be compared."""
    with shared_clock() as (clock, until):
        found = [TimedScheduler(bench, clock, until) for bench in benches]
        for timed in found:
            timed.fill()
        yield found


@contextmanager
def no_collections() -> Iterator[None]:
    """Turns Python's garbage collector off; present objects are not examined until the end."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


class TimedScheduler:
    """A scheduler with full queues, and a runner that gives every turn one token."""

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
            skip_blocked=False,  # as in a server
            log_stats=True,
            continuum={"static_ttl_s": 1e6, "max_ttl_s": 1e6, "max_pinned_share": 1.0},
        )
        self.scheduler: Any = build_scheduler(setup, clock, MAX_MODEL_LEN, until)
        self.hasher = block_hasher(BLOCK_TOKENS)
        self._spare: list[Any] = []  # blocks that the running turns will grow into
        self._stats_us = 0.0
        self._make_stats = self.scheduler.make_stats
        self.scheduler.make_stats = self._timed_stats
        until.callback(self.scheduler.shutdown)

    def fill(self) -> None:
        """Pin, then run, then queue: the simulated machine has memory for one after the other."""
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
        """Allocate all blocks except those of the next steps, so that waiting turns keep waiting."""
        pool = self.scheduler.kv_cache_manager.block_pool
        self._spare = pool.get_new_blocks(pool.get_num_free_blocks())
        self._give_back()

    def _give_back(self) -> None:
        """Each running turn may need a block in a step."""
        pool = self.scheduler.kv_cache_manager.block_pool
        missing = max(0, self.bench.running_turns + 1 - pool.get_num_free_blocks())
        if missing:
            pool.free_blocks([self._spare.pop() for _ in range(missing)])

    def _check(self) -> None:
        lifecycle = getattr(self.scheduler, "_lifecycle", None)
        pinned = len(lifecycle.pins.pinned) if lifecycle else 0
        if pinned != self.bench.pinned_programs:
            raise SweepError(
                f"{self.bench.contender} holds {pinned} pins where {self.bench.pinned_programs} were asked "
                "for; time pins with static-ttl"
            )

    def step(self) -> StepCost:
        """One decode step of all running turns, and its time."""
        self.clock.advance_to(self.clock.now_s + 0.01)
        self._give_back()
        self._stats_us = 0.0
        schedule_us, output = timed_us(self.scheduler.schedule)
        if output.total_num_scheduled_tokens != self.bench.running_turns:
            raise SweepError(
                f"{self.bench}: a step of {output.total_num_scheduled_tokens} tokens is no decode step"
            )
        answer = self._answer_to(output)
        update_us, _ = timed_us(lambda: self.scheduler.update_from_output(output, answer))
        return StepCost(schedule_us, update_us - self._stats_us, self._stats_us)

    def _timed_stats(self, *args: Any, **kwargs: Any) -> Any:
        self._stats_us, stats = timed_us(lambda: self._make_stats(*args, **kwargs))
        return stats

    def _step(self) -> None:
        self.clock.advance_to(self.clock.now_s + 1.0)  # so that admission admits those that it holds
        output = self.scheduler.schedule()
        self.scheduler.update_from_output(output, self._answer_to(output))

    def _prefilling(self) -> bool:
        return any(r.is_prefill_chunk for r in self.scheduler.running)

    def _answer_to(self, output: SchedulerOutput) -> ModelRunnerOutput:
        ids = list(output.num_scheduled_tokens)
        tokens = [[] if self.scheduler.requests[i].is_prefill_chunk else [1] for i in ids]
        index = {request_id: at for at, request_id in enumerate(ids)}
        return ModelRunnerOutput(ids, index, tokens)

    def _send(
        self, name: str, outputs: int, stream: int, *, last: bool = True, prompt_tokens: int = PROMPT_TOKENS
    ) -> None:
        fields = {"job_id": name, "is_last_step": last, "this_func_call": "bash"}
        params = SamplingParams(max_tokens=outputs, ignore_eos=True, extra_args=fields)
        request = Request(
            request_id=name,
            prompt_token_ids=[stream] * prompt_tokens,
            sampling_params=params,
            pooling_params=None,
            arrival_time=self.clock.now_s,
            block_hasher=self.hasher,
        )
        self.scheduler.add_request(request)
