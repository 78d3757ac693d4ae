"""The event loop around vLLM's scheduler: programs in, a Result out, no GPU and no waiting.

    deliver what is due -> schedule() -> how long does the step take? -> update_from_output() -> ...

The scheduler, the KV manager and the block pool are vLLM's own; the tiers are the fake connector's.
Several engines share one clock and one timetable (experiments/fleet/ routes between them).
At the end of each run the tables must balance, or it fails with the equation that does not hold.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from connectors.fake.scheduler_side import FakeMetadata, LoadJob
from continuum_lmcache.errors import InvariantError, TraceError
from continuum_lmcache.retention.pin_table import PinTable
from continuum_lmcache.types import Tier
from experiments.sim.agents import Agents
from experiments.sim.clock import Timetable, VirtualClock, virtual_time
from experiments.sim.gate import Gate
from experiments.sim.peers import timed_modules
from experiments.sim.result import Result
from experiments.sim.serving import Setup, build_scheduler
from experiments.workload import Program, unknown_gaps


def simulate(programs: Sequence[Program], setup: Setup) -> Result:
    """Run the programs on the engine that `setup` describes. The same input gives an equal Result.

    Raises TraceError for programs that say no tool time or do not fit the GPU, InvariantError if the
    run loses a request, leaks a block, keeps a pin, or gets stuck.
    """
    with schedulers(setup, programs) as (made, clock):
        return Simulation(partial(Agents, programs), setup, made, clock).run()


@contextmanager
def schedulers(
    setup: Setup, programs: Sequence[Program], count: int = 1
) -> Iterator[tuple[list[Any], VirtualClock]]:
    """Schedulers of `setup` for these programs, and their clock, which is vLLM's within the block.

    Raises TraceError for programs that cannot be run.
    """
    longest, clock, made = longest_of(programs, setup), VirtualClock(), list[Any]()
    with ExitStack() as until, virtual_time(clock, timed_modules(setup.policy)):
        for _ in range(count):
            made.append(build_scheduler(setup, clock, longest + 1, until))
            until.callback(made[-1].shutdown)
        yield made, clock


def longest_of(programs: Sequence[Program], setup: Setup) -> int:
    """The longest context, tokens. Raises TraceError for programs that cannot be run."""
    if missing := unknown_gaps(programs):
        raise TraceError(f"{missing} tool times are unknown; draw them with workload.with_gaps first")
    longest = max(program.context_tokens for program in programs)
    if longest > setup.blocks * setup.block_tokens:
        raise TraceError(f"a context of {longest} tokens does not fit a GPU of {setup.blocks} blocks")
    return longest


@dataclass(frozen=True, slots=True)
class Step:
    """A running step of the model."""

    output: SchedulerOutput
    done_s: float
    sampled: dict[str, int]  # tokens that each request will get


class Engine:
    """One scheduler and its simulated GPU: in a step, or idle until an event.

    `answer` gives a request's next output, `hear` gets each EngineCoreOutput, `speed` is the GPU's speed
    relative to the setup's machine.
    """

    def __init__(
        self,
        setup: Setup,
        scheduler: Any,
        clock: VirtualClock,
        timetable: Timetable,
        agents: Agents,
        hear: Callable[[Any], None],
        speed: float = 1.0,
    ) -> None:
        self.setup, self.scheduler, self.clock, self.timetable = setup, scheduler, clock, timetable
        self.agents, self.hear, self.speed = agents, hear, speed
        self.depth = 2 if setup.async_scheduling else 1
        self.under_way: deque[Step] = deque()
        self.waits = False  # for a step's end, or at rest
        self.resting: SchedulerOutput | None = None  # nothing could run
        self.poked = False  # since it was last asked to schedule
        self.gpu_free_s = 0.0
        self.loaded: set[str] = set()  # loads that are over, not yet reported
        self.ahead: dict[str, int] = {}  # tokens taken in a merged step, still to be scheduled
        self.steps = self.scheduled_tokens = self.preemptions = 0
        self.busy_s = 0.0

    def add(self, request: Request) -> None:
        """A request arrives."""
        self.poked = True
        self.scheduler.add_request(request)

    def go_on(self) -> None:
        """Schedule, until there is a step to wait for, or nothing can run."""
        while not self.waits:
            self.poked = False
            output = self.scheduler.schedule()
            self.preemptions += len(output.preempted_req_ids or ())
            if output.total_num_scheduled_tokens:
                self._start(output)
                self.waits = len(self.under_way) >= self.depth
                continue
            self._start_loads(output.kv_connector_metadata)  # a load may start without a step
            self.waits = True
            if not self.under_way:
                self.resting = output

    @property
    def wakes_s(self) -> float:
        """When it acts next, if there is no event before."""
        if self.under_way:
            return self.under_way[0].done_s
        if self.poked or self.loaded:
            return -math.inf
        return self._due_s

    def wake(self) -> None:
        """Act now: end the step or the idle time, and report to the scheduler and the agents."""
        self.waits = False
        if self.resting is not None:
            output, self.resting = self.resting, None
            self._update(output, {})
        else:
            step = self.under_way.popleft()
            self._update(step.output, step.sampled)

    def expire(self) -> None:
        """Let the pins of programs without a reported end expire."""
        while self._pin_table is not None and (deadline_s := self._pin_table.next_deadline_s()) is not None:
            self.clock.advance_to(max(deadline_s, self.clock.now_s))
            self._update(self.scheduler.schedule(), {})

    def _start(self, output: SchedulerOutput) -> None:
        """Start the step on the GPU, after the running one."""
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
        self._start_loads(output.kv_connector_metadata)
        self.gpu_free_s = max(self.clock.now_s, self.gpu_free_s) + forward_s
        self.busy_s += forward_s
        self.steps += merged
        self.scheduled_tokens += sum(new for new, _ in batch) * merged
        self.under_way.append(Step(output, self.gpu_free_s, sampled))

    def _forward(self, batch: Sequence[tuple[int, int]], sampled: dict[str, int]) -> tuple[int, float]:
        """How many steps are taken together, and how long they last."""
        step_s = self._seconds(batch)
        most = self.setup.merge_steps
        if most == 1 or self.depth > 1 or any(new > 1 for new, _ in batch) or not all(sampled.values()):
            return 1, step_s
        left = (r.max_tokens - r.num_output_tokens for r in map(self.scheduler.requests.get, sampled))
        quiet_s = min(self.timetable.next_s, self._due_s) - self.clock.now_s
        merged = max(1, int(min(most, min(left), quiet_s / step_s)))
        later = [(new, context + (merged - 1) // 2) for new, context in batch]
        return merged, merged * self._seconds(later)

    def _seconds(self, batch: Sequence[tuple[int, int]]) -> float:
        return self.setup.machine.seconds(batch) / self.speed

    def _start_loads(self, meta: KVConnectorMetadata | None) -> None:
        """Start the loads of a step. They run beside it."""
        for job in meta.loads if isinstance(meta, FakeMetadata) else ():
            self._note_tiers(job)
            self.timetable.at(self.clock.now_s + job.duration_s, partial(self.loaded.add, job.request_id))

    def _note_tiers(self, job: LoadJob) -> None:
        """A turn's tokens by source are those of its first load: a preempted one loads again."""
        live = self.agents.asked[job.request_id]
        if live.ssd_tokens is None:
            blocks = sum(len(copy.block_ids) for copy in job.copies if copy.tier is Tier.SSD)
            live.ssd_tokens = blocks * self.setup.block_tokens

    def _update(self, output: SchedulerOutput, sampled: dict[str, int]) -> None:
        """Give the scheduler a worker's result, and the agents their outputs."""
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
                self.hear(said)

    @property
    def _due_s(self) -> float:
        """The scheduler's next deadline; stock has none."""
        asked = getattr(self.scheduler, "next_due_s", None)
        due_s = asked() if asked else None
        return math.inf if due_s is None else due_s

    @property
    def _pin_table(self) -> PinTable | None:
        engine = getattr(self.scheduler, "_engine", None)  # a stock scheduler has none
        return engine.pins if engine is not None else None

    def check(self) -> None:
        """Raise InvariantError unless all blocks and pins were released."""
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        table, connector = self._pin_table, self.scheduler.connector
        pinned = table.pinned_blocks if table else 0
        side = getattr(connector, "scheduler_side", None)  # the fake connector's
        tracked = len(side.tracked) if side else 0
        for holds, equation in (
            (not self.scheduler.requests, f"requests left({len(self.scheduler.requests)}) != 0"),
            (free == self.setup.blocks, f"free blocks({free}) != blocks({self.setup.blocks})"),
            (pinned == 0, f"pinned blocks({pinned}) != 0"),
            (tracked == 0, f"requests the connector knows({tracked}) != 0"),
        ):
            if not holds:
                raise InvariantError(f"at the end of the run {equation}")
        if table:
            table.check()
        if side:
            side.store.check()

    @property
    def pins(self) -> dict[str, int]:
        """Taken, and ended by outcome; empty for a stock scheduler."""
        if (table := self._pin_table) is None:
            return {}
        return {"taken": table.taken, **{outcome.value: n for outcome, n in table.outcomes.items()}}


class Simulation:
    """One run of some engines, all with `setup`. `run` may be called once."""

    def __init__(
        self,
        agents_of: Callable[..., Agents],
        setup: Setup,
        schedulers: Sequence[Any],
        clock: VirtualClock,
        speeds: Sequence[float] = (1.0,),
    ) -> None:
        self.setup, self.clock = setup, clock
        self.timetable = Timetable()
        self.gate = Gate(setup.machine.kv_tokens, clock, self.timetable, self.admit) if setup.gate else None
        self.agents = agents_of(setup, clock, self.timetable, self.send)
        self.engines = [
            Engine(setup, scheduler, clock, self.timetable, self.agents, partial(self.hear, at), speed)
            for at, (scheduler, speed) in enumerate(zip(schedulers, speeds, strict=True))
        ]

    def send(self, request: Request) -> None:
        """A turn arrives."""
        (self.gate.arrive if self.gate else self.admit)(request)

    def admit(self, request: Request) -> None:
        """The engine gets a turn."""
        self.engines[0].add(request)

    def hear(self, _replica: int, said: Any) -> None:
        """An engine has an output of a request."""
        if self.gate:
            self.gate.heard(said)
        self.agents.hear(said)

    def run(self) -> Result:
        self.advance_while(lambda: not self.agents.done)
        self.drain()
        return self.result()

    def advance_while(self, goes_on: Callable[[], bool]) -> None:
        """Let the engines act and time pass, event by event."""
        while goes_on():
            self.timetable.run_due(self.clock.now_s)
            for engine in self.engines:
                engine.go_on()
            self._pass_time()

    def drain(self) -> None:
        """End what is under way. Raises InvariantError unless the engines are empty then."""
        for engine in self.engines:  # scheduled ahead of the last token
            while engine.under_way:
                self.clock.advance_to(max(engine.under_way[0].done_s, self.clock.now_s))
                engine.wake()
        for engine in self.engines:
            engine.expire()
            engine.check()

    def _pass_time(self) -> None:
        """Advance to the next time at which an engine can act. While all compute, arrivals wait for one."""
        then_s = min(engine.wakes_s for engine in self.engines)
        if any(engine.resting is not None for engine in self.engines):
            then_s = min(then_s, self.timetable.next_s)
        if math.isinf(then_s) and then_s > 0:
            names = [name for engine in self.engines for name in engine.scheduler.requests]
            raise InvariantError(f"stuck at {self.clock.now_s:.3f} s: {len(names)} wait: {names[:5]}")
        self.clock.advance_to(max(then_s, self.clock.now_s))
        self.timetable.run_due(self.clock.now_s)
        for engine in self.engines:
            if engine.wakes_s <= self.clock.now_s:
                engine.wake()

    def result(self) -> Result:
        pins: Counter[str] = Counter()
        for engine in self.engines:
            pins.update(engine.pins)
        return Result(
            jobs=self.agents.ended,
            turns=self.agents.turns,
            steps=sum(engine.steps for engine in self.engines),
            scheduled_tokens=sum(engine.scheduled_tokens for engine in self.engines),
            busy_s=sum(engine.busy_s for engine in self.engines),
            preemptions=sum(engine.preemptions for engine in self.engines),
            pins=dict(pins),
            measured=self.setup.machine.measured,
        )
