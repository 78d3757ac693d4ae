"""Measures what our scheduler costs beside vLLM's own.    python -m experiments.overhead

Each contender runs in a process of its own, in turn, and does the same things: vLLM's scheduler without a
model, in virtual time. A figure is CPU time of the scheduler's thread: a busy machine adds nothing to it,
though it makes all of them longer, so read the ratio. It is the median over the repeats, in brackets the
least and the greatest. "stock again" is stock's own scheduler a second time: its ratio is the error of a
ratio.

A turn is its arrival, a step with its prompt, one decode step, and the step without tokens in which vLLM
tells its worker that it is over; between turns the engine is idle. Its program has a context of so many
tokens, of which the GPU holds all but what is new, and a tier of size 0. "named": the client names program
and tool. "read off": the program is known by its prompts, and the tool by the answer's last 512 tokens.

A step is schedule() and update_from_output() of decodes. A refused turn has a context of 100,000 tokens, in
a pin where there are pins, and waits for memory beside 16 that run. Known programs are away in their tools
and become overdue at one moment: of the steps after it the longest counts.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
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
MAX_MODEL_LEN = 1_000_000
KV_TOKENS = 2_000_000
STEP_TOKENS = 8192
CONTEXTS = (2_000, 20_000, 100_000, 500_000)
RUNNING = (1, 16, 256)
RUNNING_TOKENS = 2_000  # of each turn that decodes
REFUSED_TOKENS = 100_000
BESIDE = 16  # turns that decode beside a refused one
WAITING = 2_000  # turns in line beside one that ends
KNOWN = 10_000  # programs that are away
AT_ONCE = 500  # of these, served in one batch
NEW_TOKENS = 200  # a turn
SMOKE = 50  # all of it so many times smaller, for a test
TEXT = "I shall run the tests again, with more output. " * 12 + "\n```bash\npython -m pytest -q tests\n```"
TOOL = ("pytest", "bash")  # the tool calls of TEXT
LETTERS = {letter: at for at, letter in enumerate(sorted(ByteLevel.alphabet()))}
ANSWER = [LETTERS[{" ": "\u0120", "\n": "\u010a"}.get(letter, letter)] for letter in TEXT]
CONTENDERS = {  # policy, and whether the client names program and tool
    "stock": (STOCK, True),
    "stock again": (STOCK, True),
    "named": ("continuum", True),
    "read off": ("continuum", False),
}
GOALS = {"a turn, 2,000": 1.25, "a turn, 20,000": 1.0, "a turn, 100,000": 0.75, "a turn, 500,000": 0.65} | {
    f"a step, {running} running": 1.05 for running in RUNNING
}
Figures = Mapping[str, float]  # by what was measured, in ms


def timed_ms(call: Callable[[], Any]) -> tuple[float, Any]:
    """The thread's CPU time of one call, and its answer."""
    start_ns = time.thread_time_ns()
    found = call()
    return (time.thread_time_ns() - start_ns) / 1e6, found


class Timed:
    """A real scheduler with the fake connector of size 0, and a runner that answers at once."""

    def __init__(self, contender: str, kv_tokens: int, clock: VirtualClock, until: ExitStack) -> None:
        policy, self.is_named = CONTENDERS[contender]
        self.clock, self.hasher, self._sent = clock, block_hasher(BLOCK_TOKENS), 0
        setup = Setup(
            policy=policy,
            tiers={"dram_gb": 0.0},  # for all alike: the policies keep their settings there
            machine=replace(MACHINES["h200"], kv_tokens=kv_tokens),
            step_tokens=STEP_TOKENS,
            max_seqs=1024,
            block_tokens=BLOCK_TOKENS,
            skip_blocked=False,  # as in a server
            log_stats=True,
        )
        self.scheduler: Any = build_scheduler(setup, clock, MAX_MODEL_LEN, until)
        until.callback(self.scheduler.shutdown)
        if policy != STOCK:
            self.scheduler._events.tool_calls = ToolCallReader(byte_tokenizer())
        self.pool = self.scheduler.kv_cache_manager.block_pool

    def request(self, program: str, tokens: Sequence[int], outputs: int) -> Request:
        """A turn of the program, or of one without a name."""
        fields = {"job_id": program, "this_func_call": "bash"} if self.is_named else {}
        params = SamplingParams(max_tokens=outputs, ignore_eos=True, extra_args=fields)
        params.update_from_generation_config({})
        self._sent += 1
        name, now_s = f"turn-{self._sent}", self.clock.now_s
        return Request(name, list(tokens), params, None, arrival_time=now_s, block_hasher=self.hasher)

    def step(self, said: Sequence[int] = (1,)) -> float:
        """CPU ms of one step, in which each turn that has its prompt says so much."""
        schedule_ms, output = timed_ms(self.scheduler.schedule)
        self.clock.advance_to(self.clock.now_s + 0.01)
        answer = self._answer_to(output, said)
        return schedule_ms + timed_ms(partial(self.scheduler.update_from_output, output, answer))[0]

    def serve(self) -> None:
        """Step until all turns have ended."""
        while self.scheduler.has_requests():
            self.step()

    def run_all(self, turns: Sequence[Request]) -> None:
        """Have these turns decode."""
        for turn in turns:
            self.scheduler.add_request(turn)
        queue = self.scheduler.running
        while len(self.scheduler.running) < len(turns) or any(r.is_prefill_chunk for r in queue):
            self.clock.advance_to(self.clock.now_s + 1.0)  # so that admission admits those that it holds
            self.step()
            queue = self.scheduler.running

    def hold_all_but(self, blocks: int) -> list[Any]:
        """Blocks that are taken, so that so many are left."""
        return self.pool.get_new_blocks(self.pool.get_num_free_blocks() - blocks)  # type: ignore[no-any-return]

    def _answer_to(self, output: SchedulerOutput, said: Sequence[int]) -> ModelRunnerOutput:
        ids = list(output.num_scheduled_tokens)
        tokens = [[] if self.scheduler.requests[i].is_prefill_chunk else list(said) for i in ids]
        return ModelRunnerOutput(ids, {name: at for at, name in enumerate(ids)}, tokens)


def byte_tokenizer() -> Tokenizer:
    """A tokenizer with one token per byte, without the wrapper, which the plugin does not use either."""
    found = Tokenizer(BPE(LETTERS, []))
    found.decoder = ByteLevelDecoder()
    return found


class OneProgram(Timed):
    """An idle scheduler that serves one program, a turn at a call."""

    def __init__(self, contender: str, context_tokens: int, clock: VirtualClock, until: ExitStack) -> None:
        super().__init__(contender, KV_TOKENS, clock, until)
        self._turns, self._history = 0, [1] * (context_tokens - NEW_TOKENS)

    def turn(self) -> float:
        """CPU ms of one turn, from its arrival until the engine is idle; then half a second of tool.

        Of its decode steps only the last is timed: nearly the whole answer comes in one step before.
        """
        self._turns += 1
        self._history += [1000 + self._turns] * NEW_TOKENS
        request = self.request("program", self._history, len(ANSWER))
        took_ms = timed_ms(lambda: self.scheduler.add_request(request))[0]
        while request.num_output_tokens < 1:
            took_ms += self.step(ANSWER[:1])
        self.step(ANSWER[1:-1])
        took_ms += self.step(ANSWER[-1:])
        while self.scheduler.has_requests():
            took_ms += self.step()
        self._history += ANSWER
        self.clock.advance_to(self.clock.now_s + 0.5)
        return took_ms


def turn_ms(contender: str, context_tokens: int, turns: int, *place: Any) -> float:
    """The median turn's CPU time; the first two are no usual ones."""
    timed = OneProgram(contender, context_tokens, *place)
    return median([timed.turn() for _ in range(turns + 2)][2:])


def step_ms(contender: str, running: int, steps: int, *place: Any) -> float:
    """A decode step of so many turns."""
    timed = Timed(contender, running * 4 * RUNNING_TOKENS, *place)
    timed.run_all(
        [timed.request(f"r{n}", [n + 1] * RUNNING_TOKENS, MAX_MODEL_LEN // 2) for n in range(running)]
    )
    return median(timed.step() for _ in range(steps))


def refused_ms(contender: str, tokens: int, steps: int, *place: Any) -> tuple[float, float]:
    """A decode step of BESIDE turns; and one while a turn of so many tokens is refused its memory."""
    timed = Timed(contender, KV_TOKENS, *place)
    timed.scheduler.add_request(timed.request("p", [1] * tokens, 2))
    timed.serve()
    others = [timed.request(f"r{n}", [n + 2] * RUNNING_TOKENS, MAX_MODEL_LEN // 2) for n in range(BESIDE)]
    timed.run_all(others)
    spare = timed.hold_all_but(BESIDE)

    def decode() -> float:
        timed.pool.free_blocks([spare.pop() for _ in range(BESIDE - timed.pool.get_num_free_blocks())])
        return timed.step()

    alone = median(decode() for _ in range(steps))
    timed.scheduler.add_request(timed.request("p", [1] * tokens + [0] * STEP_TOKENS, 2))
    return alone, median(decode() for _ in range(steps))


def overdue_ms(contender: str, programs: int, *place: Any) -> float:
    """The longest of the decode steps after so many programs have not come back in time."""
    timed = Timed(contender, KV_TOKENS, *place)
    for first in range(0, programs, AT_ONCE):
        for n in range(first, min(first + AT_ONCE, programs)):
            timed.scheduler.add_request(timed.request(f"k{n}", [n + 10] * 4 * BLOCK_TOKENS, 2))
        timed.serve()
    timed.run_all([timed.request("r", [1] * RUNNING_TOKENS, MAX_MODEL_LEN // 2)])
    timed.clock.advance_to(timed.clock.now_s + 3000.0)
    return max(timed.step() for _ in range(200))


def beside_waiting_ms(contender: str, waiting: int, turns: int, *place: Any) -> float:
    """The last step of a turn while so many others wait for a place."""
    timed = Timed(contender, 2 * BESIDE * RUNNING_TOKENS, *place)
    timed.run_all([timed.request("r", [1] * RUNNING_TOKENS, MAX_MODEL_LEN // 2)])
    others = range(turns)
    ending = [timed.request(f"e{n}", [n + 2] * 4 * BLOCK_TOKENS, 10 + n) for n in others]
    timed.run_all(ending)
    spare = timed.hold_all_but(BESIDE)
    for n in range(waiting):
        timed.scheduler.add_request(timed.request(f"w{n}", [n + 100] * RUNNING_TOKENS, 2))
    took = [timed.step() for _ in range(turns + 12)]
    timed.pool.free_blocks(spare)
    return median(sorted(took)[-turns:])


@contextmanager
def one_clock() -> Iterator[tuple[VirtualClock, ExitStack]]:
    """A virtual time, the stack that closes at its end, and no garbage collections."""
    clock = VirtualClock()
    with ExitStack() as until:
        until.enter_context(virtual_time(clock))
        gc.collect()
        gc.freeze()
        gc.disable()
        until.callback(gc.unfreeze)
        until.callback(gc.enable)
        yield clock, until


def figures_of(contender: str, smaller: int = 1) -> dict[str, float]:
    """All figures of one contender, of this process."""

    def measured(call: Callable[..., Any], *args: Any) -> Any:
        with one_clock() as place:
            return call(contender, *args, *place)

    found = {}
    for tokens in CONTEXTS:
        turns = 8 if tokens == CONTEXTS[-1] else 30
        found[f"a turn, {tokens:,}"] = measured(
            turn_ms, max(tokens // smaller, 1000), max(turns // smaller, 3)
        )
    if CONTENDERS[contender][1]:
        for running in RUNNING:
            found[f"a step, {running} running"] = measured(step_ms, max(running // smaller, 1), 60)
        alone, refused = measured(refused_ms, REFUSED_TOKENS // smaller, 30)
        found[f"a step, {BESIDE} running, almost no memory free"] = alone
        found[f"the same, a turn of {REFUSED_TOKENS:,} refused"] = refused
        found[f"a turn's last step, {WAITING:,} waiting"] = measured(
            beside_waiting_ms, WAITING // smaller, 10
        )
        found[f"the longest step, {KNOWN:,} programs overdue"] = measured(overdue_ms, KNOWN // smaller)
    return found


def in_a_process(contender: str) -> dict[str, float]:
    """All its figures, of a process of its own. Raises CalledProcessError."""
    command = [sys.executable, "-m", "experiments.overhead", "--contender", contender]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(repeats: Sequence[Mapping[str, Figures]]) -> list[list[str]]:
    """A row for each figure and contender; `repeats`: figures by contender. Ours have a goal."""
    rows = [["", "contender", "CPU ms", "of stock's", "goal"]]
    for what in repeats[0]["stock"]:
        for contender in repeats[0]:
            if what not in repeats[0][contender]:
                continue
            ms = median(figures[contender][what] for figures in repeats)
            ratios = [figures[contender][what] / figures["stock"][what] for figures in repeats]
            goal = GOALS.get(what) if not contender.startswith("stock") else None
            held = "" if goal is None else f"{goal:g}: {'met' if median(ratios) <= goal else 'MISSED'}"
            ratio = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            rows.append([what, contender, f"{ms:.3f}", ratio, held])
    return rows


def main(
    repeats: Annotated[int, typer.Option(help="processes of each contender")] = 3,
    contender: Annotated[str, typer.Option(help="only this one's figures, here, as JSON")] = "",
) -> None:
    """Print each figure beside its goal."""
    if contender:
        print(json.dumps(figures_of(contender)))
        return
    found = [{name: in_a_process(name) for name in CONTENDERS} for _ in range(repeats)]
    print(markdown(table(found)))


if __name__ == "__main__":
    typer.run(main)
