"""Hundreds of replicas, by a model of each.    python -m experiments.fleet.scale [--fit]

A replica of the model computes one prompt at a time beside all decodes, by the machine's step times. It
keeps contexts whole: the GPU's and DRAM's longest-idle ones go first. With `continuum` a new program starts
when its forecast fits beside those with a place; a stock engine takes turns as they come. `--fit` runs four
replicas of the model on the programs of `experiments.fleet.table`, whose figures are of vLLM's own scheduler.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import count
from statistics import mean, median, pstdev
from typing import Annotated, NamedTuple

import numpy as np
import typer

from continuum_lmcache.fleet.fleet import Fleet, ReplicaId, ReplicaReport
from continuum_lmcache.serve.replica_programs import ReplicaPrograms
from continuum_lmcache.types import ProgramId
from experiments.fleet.workloads import skewed
from experiments.sim.result import percentile
from experiments.sim.step_time import MACHINES
from experiments.tables import markdown
from experiments.workload import Program, gaps_mapped

MACHINE = MACHINES["a100"]
STOCK = "stock"
COOL_S, REPORT_S = 30.0, 0.5
CHUNK_TOKENS = 2048
LOAD_TOKENS_S = 25e9 / MACHINE.kv_bytes_per_token
EXPECTED_S = 36.0  # a program away for longer has lost its place: four mean gaps of the trace
HEAD_TOKENS = 2048  # of each prompt, which every replica has


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """What all replicas have."""

    admits: bool  # as `continuum` does
    dram_gb: float = 20.0
    expected_s: float = EXPECTED_S

    @property
    def dram_tokens(self) -> int:
        return int(self.dram_gb * 1e9) // MACHINE.kv_bytes_per_token


@dataclass(eq=False, slots=True)
class Agent:
    """A program in the run."""

    program: Program
    at: int = 0  # index of the turn
    began_s: float = 0.0
    home: int = -1  # replica of the latest turn
    moved_s: float = -math.inf
    has: dict[int, int] = field(default_factory=dict)  # tokens of its context, by replica
    preferred: int = -1  # by the hash


@dataclass(eq=False, slots=True)
class Request:
    """A turn at a replica."""

    agent: Agent
    arrival_s: float
    prompt_tokens: int
    need_tokens: int  # at its end
    to_compute: int = 0
    first_s: float = 0.0


@dataclass(eq=False)
class Model:
    """One replica."""

    index: int
    speed: float
    setup: ModelSetup

    def __post_init__(self) -> None:
        self.now_s, self.steps, self.step_s, self.left, self.version = 0.0, 0.0, 0.0, 0.0, 0
        self.decodes: list[tuple[float, int, Request]] = []  # by the step in which each ends
        self.prompts: deque[Request] = deque()  # the first one is computed
        self.waiting: list[tuple[float, int, Request]] = []  # with a place, by arrival of the program
        self.line: deque[Request] = deque()
        self.idle: OrderedDict[Agent, int] = OrderedDict()  # contexts on the GPU of programs without a turn
        self.dram: OrderedDict[Agent, int] = OrderedDict()
        self.placed: OrderedDict[Agent, tuple[float, float]] = OrderedDict()  # since when away, forecast
        self.active_tokens = self.idle_tokens = self.dram_tokens = self.context_tokens = 0
        self.placed_tokens, self.computed, self.busy_s = 0.0, 0, 0.0
        self._count = count()

    def advance(self, now_s: float) -> None:
        if self.step_s:
            done = (now_s - self.now_s) * self.speed / self.step_s
            self.steps, self.left = self.steps + done, self.left - done
            self.busy_s += now_s - self.now_s
        self.now_s = now_s

    def next_s(self) -> float:
        """When something ends here if nothing comes; the step's time is computed anew."""
        step, decoding = MACHINE.step, len(self.decodes)
        tokens, pairs = decoding, 0.0
        if self.prompts:
            request = self.prompts[0]
            chunk = min(request.to_compute, CHUNK_TOKENS)
            tokens, pairs = tokens + chunk, chunk * (request.prompt_tokens - request.to_compute / 2)
        elif not decoding:
            self.step_s = 0.0
            return math.inf
        linear_s = max(step.least_linear_s, step.per_token_s * tokens)
        read_s = step.per_cached_token_s * self.context_tokens
        self.step_s = step.fixed_s + linear_s + step.per_pair_s * pairs + read_s
        ends = [self.decodes[0][0] - self.steps] if decoding else []
        ends += [self.left] if self.prompts else []
        return self.now_s + max(0.0, min(ends)) * self.step_s / self.speed

    def arrive(self, request: Request) -> None:
        agent, number = request.agent, next(self._count)
        if not self.setup.admits:
            heapq.heappush(self.waiting, (request.arrival_s, number, request))
        elif agent in self.placed:
            heapq.heappush(self.waiting, (agent.began_s, number, request))
        else:
            self.line.append(request)
        self.start()

    def start(self) -> None:
        """Start what fits."""
        while self.waiting and self._fits(self.waiting[0][2]):
            self._start(heapq.heappop(self.waiting)[2])
        while self.line and not self.waiting and self._may_have_place(self.line[0]):
            self._start(self.line.popleft())

    def _fits(self, request: Request) -> bool:
        return self.active_tokens + request.need_tokens <= MACHINE.kv_tokens or not self.active_tokens

    def _may_have_place(self, request: Request) -> bool:
        for agent, (since_s, forecast) in [*self.placed.items()]:
            if since_s > self.now_s - self.setup.expected_s:
                break
            del self.placed[agent]
            self.placed_tokens -= forecast
        forecast = self._forecast(request)
        room = max(MACHINE.kv_tokens, self.setup.dram_tokens) - self.placed_tokens
        return self._fits(request) and (forecast <= room or not self.active_tokens)

    def _forecast(self, request: Request) -> float:
        return (request.need_tokens + request.agent.program.context_tokens) / 2

    def _start(self, request: Request) -> None:
        agent, held = request.agent, request.agent.has.get(self.index, HEAD_TOKENS)
        on_gpu = self.idle.pop(agent, 0)
        self.idle_tokens -= on_gpu
        self.active_tokens += request.need_tokens
        while self.idle_tokens and self.active_tokens + self.idle_tokens > MACHINE.kv_tokens:
            lost, tokens = self.idle.popitem(last=False)
            self.idle_tokens -= tokens
            if lost not in self.dram:
                lost.has.pop(self.index, None)
        request.to_compute = max(1, request.prompt_tokens - min(held, request.prompt_tokens))
        self.computed += request.to_compute
        if self.setup.admits:
            self._place(agent, math.inf, self._forecast(request))
        self.prompts.append(request)
        if len(self.prompts) == 1:
            self.left = math.ceil(request.to_compute / CHUNK_TOKENS)

    def _place(self, agent: Agent, since_s: float, forecast: float) -> None:
        self.placed_tokens += forecast - self.placed.pop(agent, (0.0, 0.0))[1]
        self.placed[agent] = since_s, forecast
        if since_s == math.inf:
            self.placed.move_to_end(agent)

    def ended(self) -> tuple[list[Request], list[Request]]:
        """Requests with a first token, and those that have ended, by now."""
        first, last = [], []
        if self.prompts and self.left <= 1e-6:
            request = self.prompts.popleft()
            first.append(request)
            request.first_s = self.now_s
            output = max(1, request.need_tokens - request.prompt_tokens)
            heapq.heappush(self.decodes, (self.steps + output, next(self._count), request))
            self.context_tokens += request.need_tokens
            if self.prompts:
                self.left = math.ceil(self.prompts[0].to_compute / CHUNK_TOKENS)
        while self.decodes and self.decodes[0][0] <= self.steps + 1e-6:
            request = heapq.heappop(self.decodes)[2]
            last.append(request)
            self.context_tokens -= request.need_tokens
            self.active_tokens -= request.need_tokens
            self._keep(request.agent, request.need_tokens)
        if last:
            self.start()
        return first, last

    def _keep(self, agent: Agent, tokens: int) -> None:
        """The context of a turn that has ended, on the GPU and in DRAM; none of a program that has ended."""
        is_over = agent.at + 1 == len(agent.program.turns)
        self.dram_tokens -= self.dram.pop(agent, 0)
        if self.setup.admits:
            _, forecast = self.placed[agent]
            self._place(agent, self.now_s, forecast)
            if is_over:
                self.placed_tokens -= self.placed.pop(agent)[1]
        if is_over:
            agent.has.pop(self.index, None)
            return
        self.idle[agent], self.dram[agent], agent.has[self.index] = tokens, tokens, tokens
        self.idle_tokens, self.dram_tokens = self.idle_tokens + tokens, self.dram_tokens + tokens
        while self.dram_tokens > self.setup.dram_tokens and self.dram:
            lost, size = self.dram.popitem(last=False)
            self.dram_tokens -= size
            if lost not in self.idle:
                lost.has.pop(self.index, None)

    def forget(self) -> None:
        """It starts anew, but for the turns that it still has: it drains these."""
        for agent in {*self.idle, *self.dram}:
            agent.has.pop(self.index, None)
        self.idle.clear()
        self.dram.clear()
        self.idle_tokens = self.dram_tokens = 0
        for agent, (since_s, forecast) in [*self.placed.items()]:
            if since_s < math.inf:
                del self.placed[agent]
                self.placed_tokens -= forecast


class Counted(NamedTuple):
    """Sums over a run so far."""

    at_s: float
    busy_s: list[float]  # by replica
    computed: int
    new_tokens: int
    turns: int
    moves: int
    thrash: int


class Run:
    """Programs over replicas of the model."""

    def __init__(
        self, agents: Sequence[Agent], speeds: Sequence[float], setup: ModelSetup, router: str, until_s: float
    ) -> None:
        n = len(speeds)
        self.models = [Model(at, speed, setup) for at, speed in enumerate(speeds)]
        self.requests, self.pending, self.contexts = np.zeros(n), np.zeros(n), np.zeros(n)
        self.up, self.until_s, self.now_s = np.zeros(n), until_s, 0.0  # `up`: infinite where a replica drains
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self._count, self._turn = count(), count()
        self.choose = ROUTERS[router](self)
        self.waits_s: list[
            tuple[float, int, float, int]
        ] = []  # arrival, turn, until the first token, replica
        self.jobs_s: list[float] = []
        self.turns = self.moves = self.thrash = self.new_tokens = 0
        self.more: Iterator[Program] = iter(())  # one begins when another ends
        self.counted: Counted | None = None  # when turns begin to count
        for agent in agents:
            self.at(agent.program.arrival_s, lambda a=agent: self.begin(a))

    def at(self, at_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self.events, (at_s, next(self._count), do))

    def play(self) -> None:
        while self.events and self.events[0][0] <= self.until_s:
            self.now_s, _, do = heapq.heappop(self.events)
            do()

    def sums(self) -> Counted:
        busy_s, computed = [m.busy_s for m in self.models], sum(m.computed for m in self.models)
        return Counted(self.now_s, busy_s, computed, self.new_tokens, self.turns, self.moves, self.thrash)

    def count_from(self, at_s: float) -> None:
        def begin() -> None:
            self.counted = self.sums()

        self.at(at_s, begin)

    def begin(self, agent: Agent) -> None:
        agent.began_s = self.now_s
        self.send(agent)

    def send(self, agent: Agent) -> None:
        spec = agent.program.turns[agent.at]
        to = self.choose(agent, spec.input_tokens)
        if agent.home not in (-1, to):
            self.moves += 1
            self.thrash += self.now_s - agent.moved_s < COOL_S
            agent.moved_s = self.now_s
        agent.home, self.turns = to, self.turns + 1
        self.new_tokens += spec.new_tokens
        request = Request(agent, self.now_s, spec.input_tokens, spec.input_tokens + spec.output_tokens)
        held = agent.has.get(to, HEAD_TOKENS)
        self.requests[to] += 1
        self.pending[to] += max(0, request.prompt_tokens - held)
        self.contexts[to] += request.need_tokens
        model = self.models[to]
        load_s = 0.0 if agent in model.idle else agent.has.get(to, 0) / LOAD_TOKENS_S
        self.at(self.now_s + load_s, lambda: self.change(model, lambda: model.arrive(request)))

    def change(self, model: Model, do: Callable[[], object]) -> None:
        model.advance(self.now_s)
        do()
        model.version += 1
        version, then_s = model.version, model.next_s()
        if then_s < math.inf:
            self.at(then_s, lambda: self.wake(model, version))

    def wake(self, model: Model, version: int) -> None:
        if version == model.version:
            self.change(model, lambda: self.hear(model))

    def hear(self, model: Model) -> None:
        first, last = model.ended()
        at = model.index
        for request in first:
            wait_s = request.first_s - request.arrival_s
            self.waits_s.append((request.arrival_s, request.agent.at + 1, wait_s, at))
            self.pending[at] = max(0.0, self.pending[at] - request.to_compute)
        for request in last:
            agent = request.agent
            self.requests[at] -= 1
            self.contexts[at] -= request.need_tokens
            self.on_end(agent, at)
            gap_s = agent.program.turns[agent.at].gap_s
            agent.at += 1
            if agent.at == len(agent.program.turns):
                self.jobs_s.append(self.now_s - agent.began_s)
                if (following := next(self.more, None)) is not None:
                    self.begin(Agent(following))
            else:
                self.at(self.now_s + (gap_s or 0.0), lambda a=agent: self.send(a))

    def on_end(self, agent: Agent, at: int) -> None:
        """For a router that hears of it."""

    # routers: the replica of a turn ------------------------------------------

    def round_robin(self, _agent: Agent, _tokens: int) -> int:
        while self.up[to := next(self._turn) % len(self.models)]:
            pass
        return to

    def least(self, _agent: Agent, _tokens: int) -> int:
        return int((self.requests + self.up).argmin())

    def hash(self, agent: Agent, _tokens: int) -> int:
        if agent.preferred < 0 or self.up[agent.preferred]:
            name = agent.program.program_id.encode()
            digests = np.frombuffer(
                b"".join(
                    blake2b(name, digest_size=4, salt=at.to_bytes(8, "little")).digest()
                    for at in range(len(self.models))
                ),
                dtype="<u4",
            )
            agent.preferred = int((digests + self.up).argmin())
        return agent.preferred

    def sticky(self, agent: Agent, tokens: int) -> int:
        is_home = agent.home >= 0 and not self.up[agent.home]
        return agent.home if is_home else self.least(agent, tokens)

    def _new(self, agent: Agent, tokens: int) -> np.ndarray:
        new = np.full(len(self.models), float(max(0, tokens - HEAD_TOKENS)))
        for at, held in agent.has.items():
            new[at] = max(0, tokens - held)
        return self.pending + new

    def lmetric(self, agent: Agent, tokens: int) -> int:
        return int((self._new(agent, tokens) * (self.requests + 1) + self.up).argmin())

    def hits_load(self, agent: Agent, tokens: int) -> int:
        return int((self._new(agent, tokens) + self.contexts + self.up).argmin())


def ours(run: Run) -> Callable[[Agent, int], int]:
    """The product's fleet, with a report of each replica each half second."""
    fleet, programs = Fleet(), [ReplicaPrograms() for _ in run.models]
    admits = run.models[0].setup.admits

    def report() -> None:
        for at, there in enumerate(programs):
            if not run.up[at]:
                waits_s = None if admits else _longest_wait_s(run.models[at], run.now_s)
                figures = ReplicaReport(ReplicaId(str(at)), int(run.requests[at]), waits_s)
                fleet.on_report(run.now_s, figures, there.report(run.now_s))
        run.at(run.now_s + REPORT_S, report)

    def on_end(agent: Agent, at: int) -> None:
        is_last = agent.at + 1 == len(agent.program.turns)
        programs[at].on_stop([ProgramId(agent.program.program_id)], True, is_last)

    def choose(agent: Agent, _tokens: int) -> int:
        name, gone = ProgramId(agent.program.program_id), [str(at) for at in np.nonzero(run.up)[0]]
        route = fleet.on_arrival(run.now_s, name, gone)
        assert route is not None
        to = int(route.replica)
        programs[to].on_start(run.now_s, [name], route.program_turns, route.program_age_s)
        return to

    run.on_end = on_end  # type: ignore[method-assign]
    report()
    return choose


def _longest_wait_s(model: Model, now_s: float) -> float:
    waiting = [model.waiting[0][2]] if model.waiting else []
    return max((now_s - each.arrival_s for each in [*waiting, *[*model.prompts][:1]]), default=0.0)


ROUTERS: dict[str, Callable[[Run], Callable[[Agent, int], int]]] = {
    "round-robin": lambda run: run.round_robin,
    "least": lambda run: run.least,
    "hash": lambda run: run.hash,
    "sticky": lambda run: run.sticky,
    "lmetric": lambda run: run.lmetric,
    "hits-load": lambda run: run.hits_load,
    "ours": ours,
}


def restart(run: Run, from_s: float, at_once: int, down_s: float) -> None:
    """Replicas drain and start anew, so many at a time, each batch after the one before."""

    def down(first: int) -> None:
        if first < len(run.models):
            run.up[first : first + at_once] = math.inf
            run.at(run.now_s + down_s, lambda: up(first))

    def up(first: int) -> None:
        for model in run.models[first : first + at_once]:
            model.forget()
        run.up[first : first + at_once] = 0.0
        down(first + at_once)

    run.at(from_s, lambda: down(0))


def living(count: int, stretch: float, over_s: float, seed: int) -> list[Agent]:
    """Programs in the midst of their runs, which begin within `over_s`; `stretch`: of the tool gaps."""
    rng = np.random.default_rng(seed)
    found = []
    for program in skewed(count, seed):
        slower = gaps_mapped(program, lambda said_s: said_s * stretch)
        found.append(Agent(replace(slower, arrival_s=float(rng.uniform(0.0, over_s)))))
        found[-1].at = int(rng.integers(len(program.turns)))
    return found


HEADER = (
    *("engines", "router", "first tokens P50, P90, P99, s", "P90 of replicas: median, max, s"),
    *("busy: mean, deviation", "computed / new tokens", "turns a second", "moved", "thrash"),
)


def row(name: str, router: str, run: Run) -> list[str]:
    """Figures since `count_from`."""
    then, now = run.counted, run.sums()
    assert then is not None
    waits = [(wait_s, at) for arrival_s, _, wait_s, at in run.waits_s if arrival_s >= then.at_s]
    by: dict[int, list[float]] = {}
    for wait_s, at in waits:
        by.setdefault(at, []).append(wait_s)
    p90 = [percentile(values, 90) for values in by.values()]
    busy = [(b - a) / (run.until_s - then.at_s) for a, b in zip(then.busy_s, now.busy_s, strict=True)]
    shown = [percentile([wait_s for wait_s, _ in waits], q) for q in (50, 90, 99)]
    return [
        name,
        router,
        ", ".join(f"{value:.1f}" for value in shown),
        f"{median(p90):.1f}, {max(p90):.1f}",
        f"{mean(busy):.0%}, {pstdev(busy):.0%}",
        f"{(now.computed - then.computed) / (now.new_tokens - then.new_tokens):.2f}",
        f"{len(waits) / (run.until_s - then.at_s):.0f}",
        f"{(now.moves - then.moves) / (now.turns - then.turns):.1%}",
        f"{now.thrash - then.thrash}",
    ]


def fit(seeds: Sequence[int]) -> list[list[str]]:
    """Mean job times of the model on the programs of `experiments.fleet.table`, at rho 1.3."""
    from experiments.fleet.table import SPEEDS, programs_of  # imports vLLM, which nothing else needs here

    lines = [["engines", "router", "mean job of the model, s"]]
    for policy in (STOCK, "continuum"):
        for router in ("hash", "sticky", "least", "ours"):
            jobs = []
            for seed in seeds:
                agents = [Agent(program) for program in programs_of(200, 1.3, seed)]
                run = Run(agents, SPEEDS, ModelSetup(policy != STOCK), router, 20_000.0)
                run.play()
                assert len(run.jobs_s) == len(agents)
                jobs.append(mean(run.jobs_s))
            lines.append([policy, router, f"{mean(jobs):.0f}"])
    return lines


def main(
    replicas: int = 256,
    programs: int = 20_000,
    stretch: Annotated[float, typer.Option(help="times the tool gaps of the trace")] = 10.0,
    dram_gb: float = 300.0,
    lasts_s: float = 900.0,
    router: Annotated[list[str], typer.Option(help=", ".join(ROUTERS))] = [*ROUTERS],  # noqa: B006
    engine: Annotated[list[str], typer.Option(help="stock, continuum")] = ["continuum"],  # noqa: B006
    seed: int = 3,
    at_once: Annotated[int, typer.Option(help="replicas that restart together; 0: none does")] = 0,
    fitted: Annotated[bool, typer.Option("--fit", help="four replicas, against vLLM's scheduler")] = False,
) -> None:
    """Run, and print a table in Markdown. Turns count that came in the second half."""
    if fitted:
        print(markdown(fit([seed])))
        return
    lines = [[*HEADER]]
    for policy in engine:
        setup = ModelSetup(policy != STOCK, dram_gb, EXPECTED_S * stretch)
        for name in router:
            agents = living(programs, stretch, lasts_s / 2, seed)
            run = Run(agents, (1.0,) * replicas, setup, name, lasts_s)
            run.more = (a.program for a in living(programs, stretch, 0.0, seed + 1))
            run.count_from(lasts_s / 2)
            if at_once:
                restart(run, lasts_s / 2, at_once, lasts_s * at_once / replicas / 3)
            run.play()
            lines.append(row(policy, name, run))
            print(markdown([HEADER, lines[-1]]), flush=True)
    print(markdown(lines))


if __name__ == "__main__":
    typer.run(main)
