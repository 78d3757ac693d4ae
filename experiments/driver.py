"""Run programs against a server: open-loop arrivals, closed-loop turns, real waits for tool gaps.

What a turn sends, in half-open intervals of its prompt:

    [0, kept)      the head of the last prompt and the server's real answer;
                   kept = input - new, so a trace with a stripped history ends it there
    [kept, input)  random tokens, the same for the same seed, program and turn
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from experiments.client import Answer, Heard, TurnFailed, request_body
from experiments.sessions import SessionTurn, played
from experiments.workload import Program, TurnSpec

Complete = Callable[[Mapping[str, Any]], Awaitable[Answer]]
Streamed = Callable[[Mapping[str, Any], Heard], Awaitable[Answer]]
Identify = Callable[[Program, int], Mapping[str, Any]]  # turn n's program fields in the body
SHARED, OWN = range(2)  # which stream of a seed the tokens come from
PAUSE_S = 1.0  # of a session after a failed turn
LONGEST_NAME = 256  # characters that the wire format allows in a tool's name


def identity(program: Program, number: int) -> dict[str, Any]:
    """The turn's fields about its program, at the top level of the body."""
    fields = {"job_id": program.program_id, "is_last_step": number == len(program.turns)}
    tool = tool_name(program.turns[number - 1])
    return fields | ({"this_func_call": tool} if tool else {})


def untold(program: Program, number: int) -> dict[str, Any]:
    """The same of a client that does not say which turn is its last, as most agents do not."""
    return {name: value for name, value in identity(program, number).items() if name != "is_last_step"}


def tool_name(turn: TurnSpec) -> str:
    """The tool, and for a shell the command that it runs, which decides how long it takes."""
    command = turn.command.rpartition("&&")[2] if turn.command.startswith("cd ") else turn.command
    words = command.split() if turn.tool.lower() == "bash" else []
    return " ".join([turn.tool, *words[:1]])[:LONGEST_NAME]


def anonymous(_program: Program, _number: int) -> dict[str, Any]:
    """A client that sends no fields about its program."""
    return {}


@dataclass(frozen=True, slots=True)
class Plan:
    """How the programs are sent."""

    model: str
    seed: int
    vocabulary: range  # token ids to draw new tokens from: no special tokens
    shared_prefix_tokens: int = 0  # the head that all programs' first prompts have in common
    time_scale: float = 1.0  # of tool gaps
    identify: Identify = identity


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """The result of a turn. Times in seconds since the replay's start; null if it failed."""

    program: str
    turn: int  # from 1
    of_turns: int
    t_arrive: float  # when it was due: the program's arrival, or the last turn's end plus the gap
    t_sent: float  # later than t_arrive only by this program's own delay
    t_first: float | None
    t_done: float | None
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None  # null: the server does not say
    gap_s: float  # slept after the turn, already scaled
    error: str | None


async def run(
    programs: Sequence[Program], plan: Plan, complete: Complete, record: Callable[[TurnRecord], None]
) -> None:
    """Run all programs to their end, or to their first failure; every turn is recorded as it ends."""
    start_s = asyncio.get_running_loop().time()

    def send(_number: int, body: Mapping[str, Any]) -> Awaitable[Answer]:
        return complete(body)

    async with asyncio.TaskGroup() as tasks:
        for program in programs:
            tasks.create_task(_run_program(program, plan, send, record, start_s))


async def run_sessions(
    pool: Sequence[Program],
    plan: Plan,
    complete: Streamed,
    record: Callable[[TurnRecord], None],
    sessions: int,
    turns: list[SessionTurn],
) -> None:
    """Keep so many sessions live until cancelled. `turns` gets each turn when it is sent.

    A turn that fails is recorded, and ends its program: after PAUSE_S the session draws another.
    """
    loop = asyncio.get_running_loop()
    start_s = loop.time()

    def turn_of(session: int, program: Program, number: int) -> SessionTurn:
        asked, now_s = program.turns[number - 1].output_tokens, loop.time() - start_s
        turns.append(SessionTurn(session, program.program_id, number, len(program.turns), asked, now_s))
        return turns[-1]

    async def run_session(session: int) -> None:
        for program, first in played(pool, session, plan.seed):

            def send(number: int, body: Mapping[str, Any], program: Program = program) -> Awaitable[Answer]:
                turn = turn_of(session, program, number)
                return complete(body, lambda at_s, tokens: turn.heard(at_s - start_s, tokens))

            now = replace(program, arrival_s=loop.time() - start_s)
            if not await _run_program(now, plan, send, record, start_s, first):
                await asyncio.sleep(PAUSE_S)

    async with asyncio.TaskGroup() as tasks:
        for session in range(sessions):
            tasks.create_task(run_session(session))


async def _run_program(
    program: Program,
    plan: Plan,
    send: Callable[[int, Mapping[str, Any]], Awaitable[Answer]],
    record: Callable[[TurnRecord], None],
    start_s: float,
    first: int = 0,
) -> bool:
    """Whether all turns from that index on were answered."""
    loop = asyncio.get_running_loop()
    history: tuple[int, ...] = ()
    due_s = start_s + program.arrival_s
    for number, turn in enumerate(program.turns[first:], first + 1):
        prompt = next_prompt(history, program, number, plan)
        body = request_body(plan.model, prompt, turn.output_tokens)
        body |= plan.identify(program, number)
        await asyncio.sleep(due_s - loop.time())
        sent_s = loop.time()
        gap_s = (turn.gap_s or 0.0) * plan.time_scale
        times = (program.program_id, number, len(program.turns), due_s - start_s, sent_s - start_s)
        try:
            answer = await send(number, body)
        except TurnFailed as error:
            record(TurnRecord(*times, None, None, len(prompt), 0, None, gap_s, str(error)))
            return False
        ends = (answer.first_s - start_s, answer.done_s - start_s)
        counts = (answer.prompt_tokens, len(answer.token_ids))
        record(TurnRecord(*times, *ends, *counts, answer.cached_tokens, gap_s, None))
        history = (*prompt, *answer.token_ids)
        due_s = answer.done_s + gap_s
    return True


def next_prompt(history: Sequence[int], program: Program, number: int, plan: Plan) -> tuple[int, ...]:
    """The prompt of turn `number`: exactly its input_tokens long."""
    turn = program.turns[number - 1]
    if not history:  # the first turn that was sent
        kept = tuple(random_tokens(plan, (SHARED,), min(plan.shared_prefix_tokens, turn.input_tokens)))
    else:
        kept = tuple(history[: turn.kept_tokens])
    own = (OWN, zlib.crc32(program.program_id.encode()), number)
    return (*kept, *random_tokens(plan, own, turn.input_tokens - len(kept)))


def random_tokens(plan: Plan, stream: Sequence[int], count: int) -> list[int]:
    """`count` token ids from the plan's vocabulary, the same for the same seed and stream."""
    rng = np.random.default_rng([plan.seed, *stream])
    drawn: list[int] = rng.integers(plan.vocabulary.start, plan.vocabulary.stop, count).tolist()
    return drawn
