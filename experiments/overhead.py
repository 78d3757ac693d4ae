"""Measures the extra cost of our scheduler over vLLM's own.    python -m experiments.overhead

All contenders run in one process and alternate, step by step or turn by turn, so that a drift of the machine
affects all of them alike; Python's garbage collector is off. Times are CPU times of the thread: a busy
machine adds nothing to them, though it makes all of them longer. A figure is the median over the repeats of
each repeat's median; in brackets the least and the greatest of these. "stock again" is stock's own
scheduler a second time: its difference to stock is the error of a difference. All have the fake
connector of size 0.

The steps are decode steps. A turn is its arrival, a step with its prompt, one decode step, and the step
without tokens in which vLLM tells its worker that it is over; between turns the engine is idle. Its tool is
named by the client, or read off the answer's last 512 tokens.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Annotated, Any

import typer
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from continuum_lmcache.vllm_plugin.tool_calls import ToolCallReader
from experiments.sim.clock import VirtualClock, virtual_time
from experiments.sim.serving import STOCK, Setup, build_scheduler
from experiments.sim.step_time import MACHINES
from experiments.sim.streams import block_hasher
from experiments.tables import markdown

BLOCK_TOKENS = 16  # vLLM's default
MAX_MODEL_LEN = 50_000
PROMPT_TOKENS = 4096  # of turns that decode
BLOCKED_TOKENS = 20_000  # of turns that wait: more than is ever left free
WARM_UP_ROUNDS = 5
SIZES = ((1, 0), (1, 16), (16, 0), (16, 64), (256, 0), (256, 1000))  # running and waiting turns
STEP_GOAL_MS, TURN_GOAL_MS = 0.02, 0.3  # more than stock's
GOAL_RUNNING = 16  # steps with up to this many running turns have a goal
STEPS = {"stock": STOCK, "stock again": STOCK, "continuum": "continuum"}  # the first is compared with
TURNS = {  # policy, and whether the client names the tool
    "stock": (STOCK, True),
    "stock again": (STOCK, True),
    "continuum, tool named": ("continuum", True),
    "continuum, tool read off the text": ("continuum", False),
}
PROGRAM_TURNS, FIRST_TOKENS, NEW_TOKENS = 8, 2000, 200
TEXT = "I shall run the tests again, with more output. " * 12 + "\n```bash\npython -m pytest -q tests\n```"
TOOL = ("pytest", "bash")  # the tool calls of TEXT
LETTERS = {letter: at for at, letter in enumerate(sorted(ByteLevel.alphabet()))}
ANSWER = [LETTERS[{" ": "\u0120", "\n": "\u010a"}.get(letter, letter)] for letter in TEXT]
ANSWERED = (  # what the model says in each step of a turn, and whether that is timed
    *((ANSWER[:1], True), (ANSWER[1:-2], False), (ANSWER[-2:-1], False)),
    *((ANSWER[-1:], True), ([], True)),
)
Costs = Mapping[str, Sequence[float]]  # by contender, in ms


def timed_ms(call: Callable[[], Any]) -> tuple[float, Any]:
    """The thread's CPU time of one call, and its answer."""
    start_ns = time.thread_time_ns()
    found = call()
    return (time.thread_time_ns() - start_ns) / 1e6, found


@contextmanager
def one_clock() -> Iterator[tuple[VirtualClock, ExitStack]]:
    """One virtual time for all contenders, the stack that closes at its end, and no garbage collections."""
    clock = VirtualClock()
    with ExitStack() as until:
        until.enter_context(virtual_time(clock))
        gc.collect()
        gc.freeze()
        gc.disable()
        until.callback(gc.unfreeze)
        until.callback(gc.enable)
        yield clock, until


class Timed:
    """A real scheduler with the fake connector of size 0, and a runner that answers at once."""

    def __init__(self, policy: str, kv_tokens: int, clock: VirtualClock, until: ExitStack) -> None:
        self.clock, self.hasher = clock, block_hasher(BLOCK_TOKENS)
        setup = Setup(
            policy=policy,
            tiers={"dram_gb": 0.0},  # for all alike: the policies keep their settings there
            machine=replace(MACHINES["h200"], kv_tokens=kv_tokens),
            step_tokens=8192,
            max_seqs=1024,
            block_tokens=BLOCK_TOKENS,
            skip_blocked=False,  # as in a server
            log_stats=True,
        )
        self.scheduler: Any = build_scheduler(setup, clock, MAX_MODEL_LEN, until)
        until.callback(self.scheduler.shutdown)

    def request(self, name: str, tokens: list[int], outputs: int, **fields: Any) -> Request:
        params = SamplingParams(max_tokens=outputs, ignore_eos=True, extra_args=fields)
        params.update_from_generation_config({})
        now_s = self.clock.now_s
        return Request(name, tokens, params, None, arrival_time=now_s, block_hasher=self.hasher)


class TimedSteps(Timed):
    """Full queues, whose running turns get a token a step."""

    def __init__(
        self, policy: str, running: int, waiting: int, steps: int, clock: VirtualClock, until: ExitStack
    ) -> None:
        grown = PROMPT_TOKENS + steps + 8 * BLOCK_TOKENS
        super().__init__(policy, running * 2 * grown, clock, until)
        self.running = running
        for i in range(running):
            self._send(f"running-{i}", 10_000 + i, PROMPT_TOKENS)
        pool, queue = self.scheduler.kv_cache_manager.block_pool, self.scheduler.running
        while len(queue) < running or any(request.is_prefill_chunk for request in queue):
            self.clock.advance_to(self.clock.now_s + 1.0)  # so that admission admits those that it holds
            output = self.scheduler.schedule()
            self.scheduler.update_from_output(output, self._answer_to(output))
        self._spare: list[Any] = pool.get_new_blocks(pool.get_num_free_blocks())  # waiting turns keep waiting
        for i in range(waiting):
            self._send(f"waiting-{i}", 20_000 + i, BLOCKED_TOKENS)

    def step(self) -> float:
        """CPU ms of one decode step of all running turns: schedule(), update_from_output()."""
        self.clock.advance_to(self.clock.now_s + 0.01)
        pool = self.scheduler.kv_cache_manager.block_pool
        missing = self.running + 1 - pool.get_num_free_blocks()  # each running turn may need a block
        pool.free_blocks([self._spare.pop() for _ in range(missing)])
        schedule_ms, output = timed_ms(self.scheduler.schedule)
        assert output.total_num_scheduled_tokens == self.running, "no decode step of all turns"
        answer = self._answer_to(output)
        return schedule_ms + timed_ms(partial(self.scheduler.update_from_output, output, answer))[0]

    def _answer_to(self, output: SchedulerOutput) -> ModelRunnerOutput:
        ids = list(output.num_scheduled_tokens)
        tokens = [[] if self.scheduler.requests[i].is_prefill_chunk else [1] for i in ids]
        return ModelRunnerOutput(ids, {name: at for at, name in enumerate(ids)}, tokens)

    def _send(self, name: str, stream: int, tokens: int) -> None:
        fields = {"job_id": name, "is_last_step": True, "this_func_call": "bash"}
        self.scheduler.add_request(self.request(name, [stream] * tokens, MAX_MODEL_LEN, **fields))


class TimedTurns(Timed):
    """An idle scheduler that serves one program after the other, a turn at a call."""

    def __init__(self, policy: str, tool_named: bool, clock: VirtualClock, until: ExitStack) -> None:
        super().__init__(policy, 2_000_000, clock, until)
        self._tool = {"this_func_call": "bash"} if tool_named else {}
        if policy != STOCK:
            self.scheduler._events.tool_calls = ToolCallReader(byte_tokenizer())
        self._turns = 0
        self._history: list[int] = []

    def turn(self) -> float:
        """CPU ms of one turn, from its arrival until the engine is idle; then half a second of tool.

        Only the last of its decode steps is timed: nearly the whole answer comes in one step before.
        """
        program, number = divmod(self._turns, PROGRAM_TURNS)
        if not number:
            self._history = [program] * FIRST_TOKENS
        self._history += [1000 + self._turns] * NEW_TOKENS
        fields = {"job_id": f"program-{program}", "is_last_step": number == PROGRAM_TURNS - 1} | self._tool
        request = self.request(f"turn-{self._turns}", list(self._history), len(ANSWER), **fields)
        self._turns += 1
        took_ms, _ = timed_ms(lambda: self.scheduler.add_request(request))
        steps = iter(ANSWERED)
        while True:
            check_ms, is_busy = timed_ms(self.scheduler.has_requests)
            took_ms += check_ms
            if not is_busy:
                break
            schedule_ms, output = timed_ms(self.scheduler.schedule)
            tokens, is_timed = next(steps, ([], True))  # a pin of some milliseconds wakes the engine again
            said = [tokens] if output.num_scheduled_tokens else []
            answer = ModelRunnerOutput(list(output.num_scheduled_tokens), {request.request_id: 0}, said)
            self.clock.advance_to(self.clock.now_s + 0.01)
            update_ms, _ = timed_ms(partial(self.scheduler.update_from_output, output, answer))
            took_ms += is_timed * (schedule_ms + update_ms)
        self._history += ANSWER
        self.clock.advance_to(self.clock.now_s + 0.5)
        return took_ms


def byte_tokenizer() -> Tokenizer:
    """A tokenizer with one token per byte, without the wrapper, which the plugin does not use either."""
    found = Tokenizer(BPE(LETTERS, []))
    found.decoder = ByteLevelDecoder()
    return found


def in_turns(calls: Mapping[str, Callable[[], float]], rounds: int, repeats: int) -> Iterator[Costs]:
    """Each call's answers in this many rounds, by repeat. The first call changes from round to round."""
    names = list(calls)
    for call in (*calls.values(),) * WARM_UP_ROUNDS:
        call()
    for _ in range(repeats):
        costs: dict[str, list[float]] = {name: [] for name in names}
        for number in range(rounds):
            for at in range(len(names)):
                name = names[(at + number) % len(names)]
                costs[name].append(calls[name]())
        yield costs


def step_costs(running: int, waiting: int, rounds: int, repeats: int) -> list[Costs]:
    """Every contender's decode steps, by repeat."""
    steps = rounds * repeats + WARM_UP_ROUNDS
    with one_clock() as (clock, until):
        timed = {
            name: TimedSteps(policy, running, waiting, steps, clock, until) for name, policy in STEPS.items()
        }
        return list(in_turns({name: found.step for name, found in timed.items()}, rounds, repeats))


def turn_costs(rounds: int, repeats: int) -> list[Costs]:
    """Every contender's finished turns, by repeat."""
    with one_clock() as (clock, until):
        timed = {name: TimedTurns(*how, clock, until) for name, how in TURNS.items()}
        return list(in_turns({name: found.turn for name, found in timed.items()}, rounds, repeats))


def more_ms(repeats: Sequence[Costs], name: str) -> list[float]:
    """The contender's median less stock's, of each repeat."""
    return [median(costs[name]) - median(costs["stock"]) for costs in repeats]


def lines(what: str, repeats: Sequence[Costs], goal_ms: float | None) -> Iterator[list[str]]:
    """A row for each contender; ours have a goal."""
    for name in repeats[0]:
        more = more_ms(repeats, name)
        held = ""
        if goal_ms is not None and not name.startswith("stock"):
            held = f"{goal_ms:g}: {'met' if median(more) <= goal_ms else 'MISSED'}"
        middle_ms = median(median(costs[name]) for costs in repeats)
        found = f"{median(more):.3f} ({min(more):.3f} to {max(more):.3f})"
        yield [what, name, f"{middle_ms:.3f}", found, held]


def measured(sizes: Sequence[tuple[int, int]], rounds: int, repeats: int) -> list[list[str]]:
    """A table of decode steps at these numbers of running and waiting turns, and of finished turns."""
    found = [["", "contender", "CPU ms", "more than stock's", "goal"]]
    for running, waiting in sizes:
        goal_ms = STEP_GOAL_MS if running <= GOAL_RUNNING else None
        what = f"a decode step, {running} running, {waiting} waiting"
        found += lines(what, step_costs(running, waiting, rounds, repeats), goal_ms)
    return [*found, *lines("a finished turn", turn_costs(rounds, repeats), TURN_GOAL_MS)]


def main(
    rounds: Annotated[int, typer.Option(help="steps that a median is taken over")] = 60,
    repeats: Annotated[int, typer.Option(help="medians that the range is taken over")] = 7,
) -> None:
    """Print each figure beside its goal."""
    print(markdown(measured(SIZES, rounds, repeats)))


if __name__ == "__main__":
    typer.run(main)
