"""Times one finished turn in the engine's loop, from its arrival until the engine is idle again."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from experiments.sim.clock import VirtualClock
from experiments.sim.serving import Setup, build_scheduler
from experiments.sim.step_time import MACHINES
from experiments.sweep.simulated import policy_of
from experiments.sweep.timed import BLOCK_TOKENS, MAX_MODEL_LEN, timed_us

PROGRAM_TURNS = 8
FIRST_TOKENS, NEW_TOKENS = 2000, 200
TEXT = "I shall run the tests again, with more output. " * 12 + "\n```bash\npython -m pytest -q tests\n```"
TOOL = ("pytest", "bash")  # the tool calls of TEXT
LETTERS = {letter: at for at, letter in enumerate(sorted(ByteLevel.alphabet()))}
ANSWER = [LETTERS[{" ": "\u0120", "\n": "\u010a"}.get(letter, letter)] for letter in TEXT]

STEPS = (  # what the model says in each, and whether that is timed
    (ANSWER[:1], True),
    (ANSWER[1:-2], False),
    (ANSWER[-2:-1], False),
    (ANSWER[-1:], True),
    ([], True),
)


class TimedTurns:
    """An idle scheduler that serves one program after the other, a turn at a call."""

    def __init__(
        self, policy: str, tool_named: bool, clock: VirtualClock, until: ExitStack, gaps_known: int = 0
    ) -> None:
        init_none_hash(sha256)
        self.clock, self._tool_named = clock, tool_named
        machine = replace(MACHINES["h200"], kv_tokens=2_000_000)
        setup = Setup(
            policy=policy_of(policy),
            tiers={"dram_gb": 0.0},
            machine=machine,
            step_tokens=8192,
            block_tokens=BLOCK_TOKENS,
            skip_blocked=False,
            log_stats=True,
        )
        self.scheduler: Any = build_scheduler(setup, clock, MAX_MODEL_LEN, until)
        until.callback(self.scheduler.shutdown)
        if (lifecycle := getattr(self.scheduler, "_lifecycle", None)) is not None:
            lifecycle._tokenizer = byte_tokenizer()
            for gap_s in lognormal_s(gaps_known):
                lifecycle.advisor.gaps.observe(TOOL, gap_s)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self._turns = 0
        self._history: list[int] = []

    def turn(self) -> float:
        """CPU us of one turn, from its arrival until the engine is idle; then half a second of tool.

        Only the last of its decode steps is timed: nearly the whole answer comes in one step before.
        """
        program, number = divmod(self._turns, PROGRAM_TURNS)
        if not number:
            self._history = [program] * FIRST_TOKENS
        self._history += [1000 + self._turns] * NEW_TOKENS
        request = self._request(f"program-{program}", number == PROGRAM_TURNS - 1)
        self._turns += 1
        took_us, _ = timed_us(lambda: self.scheduler.add_request(request))
        steps = iter(STEPS)
        while True:
            check_us, is_busy = timed_us(self.scheduler.has_requests)
            took_us += check_us
            if not is_busy:
                break
            schedule_us, output = timed_us(self.scheduler.schedule)
            tokens, is_timed = next(steps, ([], True))  # a pin of some milliseconds wakes the engine again
            answer = ModelRunnerOutput(
                list(output.num_scheduled_tokens),
                {request.request_id: 0},
                [tokens] if output.num_scheduled_tokens else [],
            )
            self.clock.advance_to(self.clock.now_s + 0.01)
            update_us, _ = timed_us(partial(self.scheduler.update_from_output, output, answer))
            took_us += is_timed * (schedule_us + update_us)
        self._history += ANSWER
        self.clock.advance_to(self.clock.now_s + 0.5)
        return took_us

    def _request(self, program: str, last: bool) -> Request:
        fields = {"job_id": program, "is_last_step": last} | (
            {"this_func_call": "bash"} if self._tool_named else {}
        )
        params = SamplingParams(max_tokens=len(ANSWER), ignore_eos=True, extra_args=fields)
        params.update_from_generation_config({})
        return Request(
            request_id=f"{program}-{self._turns}",
            prompt_token_ids=list(self._history),
            sampling_params=params,
            pooling_params=None,
            arrival_time=self.clock.now_s,
            block_hasher=self._hasher,
        )


def lognormal_s(gaps: int) -> list[float]:
    """This many tool gaps, in random order, with a median of a second."""
    draws = Random(1)
    return [draws.lognormvariate(0.0, 1.0) for _ in range(gaps)]


def byte_tokenizer() -> Tokenizer:
    """A tokenizer with one token per byte, without the wrapper, which the plugin does not use either."""
    found = Tokenizer(BPE(LETTERS, []))
    found.decoder = ByteLevelDecoder()
    return found
