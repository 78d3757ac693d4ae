"""Programs without ids in virtual time, linked by the scheduler's PromptLinker; nothing is sent.

Every program runs twice at once, by two tenants (two `cache_salt`s) with the same tokens,
and all begin with one system prompt. One program in FORK_EVERY is forked at some turn: a second branch
continues from the same answer. One in SAMPLE_EVERY has a turn drawn SAMPLES times at once; the last draw
continues. Prompts are made as the load generator makes them, and hashed by vLLM; the
scheduler's PromptLinker links them. Nothing is sent; a turn lasts as long as its output at PACE_S a token.

A turn is continued once: the second branch of a fork and all draws but the first are to begin anew,
so they are counted apart. `wrong` are turns linked to any other turn than the one that they continue, first
turns included. The counts: right, unlinked, wrong, other tenant, begun anew, forks.
"""

from __future__ import annotations

import heapq
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from continuum_lmcache.programs.prompt_linker import PromptLinker
from continuum_lmcache.types import ProgramId
from experiments.driver import Plan, next_prompt, random_tokens
from experiments.workload import Program

FORK_EVERY, SAMPLE_EVERY, SAMPLES = 5, 7, 3
TENANTS = ("red", "blue")
PACE_S = 0.02  # a token of output
BLOCK_TOKENS = 16  # vLLM's default
SHARED_TOKENS = 2048  # the system prompt, at most half of a first prompt
MOST_TURNS = 100_000  # remembered: as many as types.MOST_PROGRAMS
ANSWER = 2  # which stream of a seed: driver.py has the others


@dataclass(slots=True)
class Branch:
    """One way through a program, by one tenant."""

    program: Program
    tenant: str
    number: int = 1  # of the next turn
    history: tuple[int, ...] = ()
    hashes: Sequence[Any] = ()  # of the history's whole blocks
    before: str = ""  # the finished turn that it continues
    again: bool = False  # somebody else continues that turn too, and comes first

    @property
    def drawn(self) -> int:
        return zlib.crc32(self.program.program_id.encode())

    def is_at(self, every: int) -> bool:
        """Whether this is the turn at which one program in `every` does something."""
        return self.drawn % every == 0 and self.number == 1 + self.drawn // every % len(self.program.turns)


@dataclass(slots=True)
class Replay:
    """Programs in virtual time, and the results of their links."""

    plan: Plan
    prompt_linker: PromptLinker = field(default_factory=lambda: PromptLinker(MOST_TURNS, BLOCK_TOKENS))
    counts: Counter[str] = field(default_factory=Counter)
    events: list[tuple[float, int, Callable[[float], None]]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        init_none_hash(sha256)  # vLLM's own global, which no block is hashed without

    def run(self, programs: Sequence[Program]) -> Counter[str]:
        """Run until the last turn; returns the counts."""
        for program in programs:
            for tenant in TENANTS:
                self.at(program.arrival_s, partial(self.arrives, Branch(program, tenant)))
        while self.events:
            now_s, _, event = heapq.heappop(self.events)
            event(now_s)
        return self.counts

    def at(self, then_s: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (then_s, next(self.numbers), event))

    def arrives(self, branch: Branch, now_s: float) -> None:
        """A turn is sent, perhaps several times."""
        draws = SAMPLES if branch.is_at(SAMPLE_EVERY) else 1
        first_tokens = branch.program.turns[0].input_tokens
        plan = replace(self.plan, shared_prefix_tokens=min(SHARED_TOKENS, first_tokens // 2))
        prompt = next_prompt(branch.history, branch.program, branch.number, plan)
        output_tokens = branch.program.turns[branch.number - 1].output_tokens
        for draw in range(draws):
            request = self.request(branch, prompt)
            matched_tokens = self.judges(replace(branch, again=branch.again or draw > 0), request)
            ends = partial(self.ends, branch, request, draw, draw == draws - 1, matched_tokens)
            self.at(now_s + output_tokens * PACE_S, ends)

    def judges(self, branch: Branch, request: Request) -> int:
        """Count the link of an arrived turn. Returns how much of its prompt counts as the turn before."""
        link = self.prompt_linker.find_link(request)
        if link is None:
            unlinked = "begun anew" if branch.number == 1 or branch.again else "unlinked"
            self.counts["forks" if branch.again and branch.number > 1 else unlinked] += 1
            return 0
        right = link.program == branch.before != ""
        self.counts["right" if right else "wrong"] += 1
        self.counts["other tenant"] += link.program.partition(" ")[0] != branch.tenant
        return link.tokens

    def ends(
        self, branch: Branch, request: Request, draw: int, goes_on: bool, matched_tokens: int, now_s: float
    ) -> None:
        """A turn has ended; its program continues from this answer, or not."""
        turn = branch.program.turns[branch.number - 1]
        answer = random_tokens(self.plan, (ANSWER, branch.drawn, branch.number, draw), turn.output_tokens)
        request.append_output_token_ids(answer)
        name = f"{branch.tenant} {branch.program.program_id}/{branch.number}/{draw}"
        self.prompt_linker.add_turn(request, ProgramId(name), now_s, matched_tokens)
        if not goes_on or branch.number == len(branch.program.turns):
            return
        later = replace(
            branch,
            number=branch.number + 1,
            history=tuple(request.all_token_ids),
            hashes=tuple(request.block_hashes),
            before=name,
            again=False,
        )
        gap_s = turn.gap_s or 0.0
        self.at(now_s + gap_s, partial(self.arrives, later))
        if branch.is_at(FORK_EVERY):
            other = replace(branch.program, program_id=f"{branch.program.program_id}-fork")
            self.at(now_s + gap_s + 1.0, partial(self.arrives, replace(later, program=other, again=True)))

    def request(self, branch: Branch, prompt: tuple[int, ...]) -> Request:
        """A vLLM request; only tokens after the hashed history are hashed."""
        known = 0
        if branch.number > 1:
            kept = branch.program.turns[branch.number - 1].kept_tokens
            known = min(kept // BLOCK_TOKENS, len(branch.hashes))
        by_block = get_request_block_hasher(BLOCK_TOKENS, sha256)

        def hasher(request: Request) -> list[Any]:
            if known and not request.block_hashes:
                request.block_hashes.extend(branch.hashes[:known])
            return by_block(request)

        name = f"{branch.tenant}/{next(self.numbers)}"
        params = SamplingParams(max_tokens=1)
        return Request(name, list(prompt), params, None, cache_salt=branch.tenant, block_hasher=hasher)
