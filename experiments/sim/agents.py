"""The clients of a simulated engine: each program sends a turn, runs its tool, sends the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from zlib import crc32

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from continuum_lmcache.programs.identity import OWNER_FIELD
from continuum_lmcache.tools.shell_key import SUBMIT, SUBMITS
from continuum_lmcache.types import NO_CALL
from experiments.peers.settings import agentic_context
from experiments.sim.clock import Timetable, VirtualClock
from experiments.sim.result import JobResult, TurnResult
from experiments.sim.serving import Setup
from experiments.sim.streams import History, block_hasher, new_streams
from experiments.sweep.cases import PEERS
from experiments.workload import Program, TurnSpec

NOT_TOOLS = ("", "human")  # what traces have where no tool was called
WRONG_ENDS = 5  # with wrong hints, one turn in so many says the contrary of whether it is the last


@dataclass(slots=True)
class LiveProgram:
    """A running program. The fields below `turn` belong to the turn at the engine."""

    program: Program
    history: History
    started_s: float = 0.0
    turn: int = 0  # index
    arrival_s: float = 0.0
    first_token_s: float | None = None
    gpu_tokens: int = 0
    loaded_tokens: int = 0
    ssd_tokens: int | None = None  # of those loaded; None before the first load

    @property
    def spec(self) -> TurnSpec:
        return self.program.turns[self.turn]

    @property
    def request_id(self) -> str:
        return f"{self.program.program_id}/{self.turn + 1}"


class Agents:
    """All programs of a run. `send` hands a request to the engine."""

    def __init__(
        self,
        programs: Sequence[Program],
        setup: Setup,
        clock: VirtualClock,
        timetable: Timetable,
        send: Callable[[Request], None],
    ) -> None:
        self.programs, self.clock, self.timetable, self.send = programs, clock, timetable, send
        self.wrong_hints, self.to_a_peer = setup.wrong_hints, setup.policy in PEERS
        self.untold_ends = setup.untold_ends
        self.hasher = block_hasher(setup.block_tokens)
        self.asked: dict[str, LiveProgram] = {}  # by request at the engine
        self.turns: list[TurnResult] = []
        self.jobs: dict[str, JobResult] = {}
        self.streams = new_streams()
        for program in programs:
            history = History(self.streams, setup.shared_tokens)
            live = LiveProgram(program, history, started_s=program.arrival_s)
            timetable.at(program.arrival_s, partial(self._submit, live))

    @property
    def done(self) -> bool:
        return len(self.jobs) == len(self.programs)

    @property
    def ended(self) -> list[JobResult]:
        """The ended programs, in the order of the input."""
        return [self.jobs[program.program_id] for program in self.programs]

    def answer(self, request_id: str, tokens: int) -> list[int]:
        """Add the model's next output to a request; ignored for one that has ended."""
        live = self.asked.get(request_id)
        return [live.history.stream] * tokens if live else []

    def hear(self, said: Any) -> None:
        """One request's EngineCoreOutput."""
        live = self.asked[said.request_id]
        if said.prefill_stats is not None:
            live.gpu_tokens = said.prefill_stats.num_local_cached_tokens
            live.loaded_tokens = said.prefill_stats.num_external_cached_tokens
        if live.first_token_s is None:
            live.first_token_s = self.clock.now_s
        if said.finish_reason is not None:
            del self.asked[said.request_id]
            self._end_turn(live, live.first_token_s)

    def _submit(self, live: LiveProgram) -> None:
        """The program's next turn arrives."""
        live.arrival_s = self.clock.now_s
        live.history.prompt(live.spec)
        self.asked[live.request_id] = live
        self.again(live.request_id)

    def again(self, request_id: str) -> None:
        """Send a turn without an answer: for the first time, or again after its engine died."""
        live = self.asked[request_id]
        live.first_token_s, live.ssd_tokens = None, None
        manners = live.program.source.split(",")  # never-last, always-last, unnamed, tenant:x (an API key's)
        says = {} if "unnamed" in manners else self._says(live, manners)
        if (tenant := next((m for m in manners if m.startswith("tenant:")), None)) is not None:
            says = {**says, OWNER_FIELD: tenant}
        if self.to_a_peer:
            last = live.spec is live.program.turns[-1] and not self.untold_ends
            says = {"agentic_context": agentic_context(live.program.program_id, last)}
        params = SamplingParams(
            temperature=0.0, max_tokens=live.spec.output_tokens, ignore_eos=True, extra_args=says
        )
        request = Request(
            request_id=live.request_id,
            prompt_token_ids=list(live.history.tokens),
            sampling_params=params,
            pooling_params=None,
            arrival_time=self.clock.now_s,
            block_hasher=self.hasher,
        )
        self.send(request)

    def _says(self, live: LiveProgram, manners: Sequence[str]) -> dict[str, Any]:
        """The client's fields about the turn, or wrong ones of a client that lies."""
        last, tool = live.spec is live.program.turns[-1], called(live.spec)
        last = (last or "always-last" in manners) and "never-last" not in manners
        if self.wrong_hints:
            drawn = crc32(live.request_id.encode())
            last = not last if drawn % WRONG_ENDS == 0 else last
            tool = f"tool-{drawn % 7}"
        last = last and not self.untold_ends
        return {"job_id": live.program.program_id, "is_last_step": last, "this_func_call": tool}

    def _end_turn(self, live: LiveProgram, first_token_s: float) -> None:
        """Record the turn; its tool starts, or the program ends."""
        now_s, program, spec = self.clock.now_s, live.program, live.spec
        ssd_tokens = min(live.ssd_tokens or 0, live.loaded_tokens)
        result = TurnResult(
            program_id=program.program_id,
            number=live.turn + 1,
            arrival_s=live.arrival_s,
            first_token_s=first_token_s,
            finished_s=now_s,
            prompt_tokens=spec.input_tokens,
            output_tokens=spec.output_tokens,
            gpu_tokens=live.gpu_tokens,
            dram_tokens=live.loaded_tokens - ssd_tokens,
            ssd_tokens=ssd_tokens,
        )
        self.turns.append(result)
        live.history.said(spec.output_tokens)
        live.turn += 1
        if live.turn == len(program.turns):
            self.jobs[program.program_id] = JobResult(program.program_id, live.started_s, now_s)
        else:
            assert spec.gap_s is not None  # simulate() has asked
            self._rest(live, spec.gap_s)

    def _rest(self, live: LiveProgram, gap_s: float) -> None:
        """The program's next turn arrives after so long."""
        self.timetable.at(self.clock.now_s + gap_s, partial(self._submit, live))


def called(turn: TurnSpec) -> str:
    """What the turn calls, as a server that reads its text finds it."""
    if turn.tool in NOT_TOOLS:
        return NO_CALL[0]
    return SUBMIT if SUBMITS.match(turn.command) else turn.tool
