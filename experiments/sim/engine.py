"""The event loop around vLLM's scheduler: programs in, a Result out, no GPU and no waiting.

    deliver what is due -> schedule() -> how long does the step take? -> update_from_output() -> ...

The scheduler, the KV manager and the block pool are vLLM's own; the tiers are the fake connector's.
At the end of each run the books must balance, or it fails with the equation that does not hold.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from connectors.fake.scheduler_side import FakeMetadata, LoadJob
from continuum_lmcache.errors import InvariantError, TraceError
from continuum_lmcache.programs.table import ProgramTable
from continuum_lmcache.types import Tier
from experiments.sim.agents import Agents
from experiments.sim.clock import Timetable, VirtualClock, virtual_time
from experiments.sim.result import Result
from experiments.sim.serving import Setup, build_scheduler
from experiments.workload import Program, unknown_gaps


def simulate(programs: Sequence[Program], setup: Setup) -> Result:
    """Run the programs on the engine that `setup` describes. The same input gives an equal Result.

    Raises TraceError for programs that say no tool time or do not fit the GPU, InvariantError if the
    run loses a request, leaks a block, keeps a pin, or gets stuck.
    """
    if missing := unknown_gaps(programs):
        raise TraceError(f"{missing} tool times are unknown; draw them with workload.with_gaps first")
    longest = max(program.context_tokens for program in programs)
    if longest > setup.blocks * setup.block_tokens:
        raise TraceError(f"a context of {longest} tokens does not fit a GPU of {setup.blocks} blocks")
    clock = VirtualClock()
    with ExitStack() as until, virtual_time(clock):
        scheduler = build_scheduler(setup, clock, longest + 1, until)
        until.callback(scheduler.shutdown)
        return Simulation(programs, setup, scheduler, clock).run()


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the model under way."""

    output: SchedulerOutput
    done_s: float
    sampled: dict[str, int]  # tokens that each request will get


class Simulation:
    """One run of one engine. `run` may be called once."""

    def __init__(
        self, programs: Sequence[Program], setup: Setup, scheduler: Any, clock: VirtualClock
    ) -> None:
        self.setup, self.scheduler, self.clock = setup, scheduler, clock
        self.timetable = Timetable()
        self.agents = Agents(programs, setup, clock, self.timetable, scheduler.add_request)
        self.depth = 2 if setup.async_scheduling else 1
        self.loads_async = bool(setup.tiers and setup.tiers.get("async"))
        self.under_way: deque[Step] = deque()
        self.gpu_free_s = 0.0
        self.loaded: set[str] = set()  # asynchronous loads that are over, not yet told
        self.ahead: dict[str, int] = {}  # tokens taken in a merged step, still to be scheduled
        self.steps = self.scheduled_tokens = self.preemptions = 0
        self.busy_s = 0.0

    def run(self) -> Result:
        while not self.agents.done:
            self.timetable.run_due(self.clock.now_s)
            self._step()
        while self.under_way:  # scheduled ahead of the last token
            self._finish(self.under_way.popleft())
        self._expire()
        self._check()
        return self._result()

    def _expire(self) -> None:
        """Let the pins run out of programs that nobody said were over."""
        while self._ledger is not None and (deadline_s := self._ledger.next_deadline_s()) is not None:
            self.clock.advance_to(max(deadline_s, self.clock.now_s))
            self._update(self.scheduler.schedule(), {})

    def _step(self) -> None:
        output = self.scheduler.schedule()
        self.preemptions += len(output.preempted_req_ids or ())
        if output.total_num_scheduled_tokens:
            self._start(output)
            if len(self.under_way) < self.depth:
                return
        elif self.under_way:
            self._moves(output.kv_connector_metadata)  # an asynchronous load may start beside the step
        else:
            self._rest(output)
            return
        self._finish(self.under_way.popleft())

    def _start(self, output: SchedulerOutput) -> None:
        """Put the step on the GPU, behind the one that is there."""
        sampled, batch = {}, []
        for request_id, tokens in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            ahead = self.ahead.pop(request_id, 0)  # these were computed and paid in the merged step
            batch.append((tokens - ahead, request.num_computed_tokens - tokens + ahead))
            sampled[request_id] = 0 if request.is_prefill_chunk else 1
        merged, forward_s = self._forward(batch, sampled)
        if merged > 1:
            sampled = dict.fromkeys(sampled, merged)
            self.ahead = dict.fromkeys(sampled, merged - 1)
        took_s = forward_s + self._moves(output.kv_connector_metadata)
        self.gpu_free_s = max(self.clock.now_s, self.gpu_free_s) + took_s
        self.busy_s += took_s
        self.steps += merged
        self.scheduled_tokens += sum(new for new, _ in batch) * merged
        self.under_way.append(Step(output, self.gpu_free_s, sampled))

    def _forward(self, batch: Sequence[tuple[int, int]], sampled: dict[str, int]) -> tuple[int, float]:
        """How many steps are taken together, and how long they last."""
        machine = self.setup.machine
        step_s = machine.seconds(batch)
        most = self.setup.merge_steps
        if most == 1 or self.depth > 1 or any(new > 1 for new, _ in batch) or not all(sampled.values()):
            return 1, step_s
        left = (r.max_tokens - r.num_output_tokens for r in map(self.scheduler.requests.get, sampled))
        quiet_s = self._next_event_s() - self.clock.now_s
        merged = max(1, int(min(most, min(left), quiet_s / step_s)))
        later = [(new, context + (merged - 1) // 2) for new, context in batch]
        return merged, merged * machine.seconds(later)

    def _moves(self, meta: KVConnectorMetadata | None) -> float:
        """Start the step's loads and stores; seconds for which the step waits for them."""
        if not isinstance(meta, FakeMetadata):
            return 0.0
        waits_s = [0.0]
        for job in meta.loads:
            self._note_tiers(job)
            if self.loads_async:
                self.timetable.at(self.clock.now_s + job.duration_s, partial(self.loaded.add, job.request_id))
            else:
                waits_s.append(job.duration_s)
        return max(waits_s) + (meta.store_s if self.setup.store_stalls else 0.0)

    def _note_tiers(self, job: LoadJob) -> None:
        """A turn's tokens by source are those of its first load: a preempted one loads again."""
        live = self.agents.asked[job.request_id]
        if live.ssd_tokens is None:
            blocks = sum(len(copy.block_ids) for copy in job.copies if copy.tier is Tier.SSD)
            live.ssd_tokens = blocks * self.setup.block_tokens

    def _finish(self, step: Step) -> None:
        """The step is over: its tokens reach the scheduler and the agents."""
        self.clock.advance_to(max(step.done_s, self.clock.now_s))
        self.timetable.run_due(self.clock.now_s)
        self._update(step.output, step.sampled)

    def _rest(self, output: SchedulerOutput) -> None:
        """Nothing can run: let time pass until something happens."""
        self._moves(output.kv_connector_metadata)
        then_s = self._next_event_s()
        if math.isinf(then_s):
            names = list(self.scheduler.requests)
            raise InvariantError(f"stuck at {self.clock.now_s:.3f} s: {len(names)} wait: {names[:5]}")
        self.clock.advance_to(max(then_s, self.clock.now_s))
        self.timetable.run_due(self.clock.now_s)
        self._update(output, {})

    def _update(self, output: SchedulerOutput, sampled: dict[str, int]) -> None:
        """Hand the scheduler what a worker would have returned, and the agents what they are told."""
        ids = list(output.num_scheduled_tokens)
        loaded = set(self.loaded)
        self.loaded.clear()
        ran = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=[self.agents.answer(i, sampled[i]) for i in ids],
            kv_connector_output=KVConnectorOutput(finished_recving=loaded) if loaded else None,
        )
        for outputs in self.scheduler.update_from_output(output, ran).values():
            for said in outputs.outputs:
                self.agents.hear(said)

    def _next_event_s(self) -> float:
        """When something happens by itself: an arrival, a load that ends, what our scheduler waits for."""
        due_s = self.scheduler.next_due_s() if self._ledger else None
        return min(self.timetable.next_s, math.inf if due_s is None else due_s)

    @property
    def _ledger(self) -> ProgramTable | None:
        lifecycle = getattr(self.scheduler, "_lifecycle", None)  # a stock scheduler has none
        return lifecycle.ledger if lifecycle is not None else None

    def _check(self) -> None:
        """Raise InvariantError unless everything that was taken was given back."""
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        ledger, connector = self._ledger, self.scheduler.connector
        pinned = ledger.pinned_blocks if ledger else 0
        tracked = len(connector.planner.tracked) if connector else 0
        for holds, equation in (
            (not self.scheduler.requests, f"requests left({len(self.scheduler.requests)}) != 0"),
            (free == self.setup.blocks, f"free blocks({free}) != blocks({self.setup.blocks})"),
            (pinned == 0, f"pinned blocks({pinned}) != 0"),
            (tracked == 0, f"requests the connector knows({tracked}) != 0"),
        ):
            if not holds:
                raise InvariantError(f"at the end of the run {equation}")
        if ledger:
            ledger.check()
        if connector:
            connector.planner.store.check()

    def _result(self) -> Result:
        ledger = self._ledger
        ends = {outcome.value: n for outcome, n in ledger.outcomes.items()} if ledger else {}
        return Result(
            jobs=[self.agents.jobs[p.program_id] for p in self.agents.programs],
            turns=self.agents.turns,
            steps=self.steps,
            scheduled_tokens=self.scheduled_tokens,
            busy_s=self.busy_s,
            preemptions=self.preemptions,
            pins={"taken": ledger.taken, **ends} if ledger else {},
            measured=self.setup.machine.measured,
        )
