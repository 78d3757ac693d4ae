"""A program's live turn: from its request's arrival until its end."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence, Sized
from dataclasses import dataclass

from continuum_lmcache.programs.identity import ProgramFields
from continuum_lmcache.programs.program import Program, Stage
from continuum_lmcache.programs.prompt_linker import HashedPrompt, ProgramLink, tail_of
from continuum_lmcache.types import QueueEntry, TurnId

PromptKey = tuple[Hashable, ...]  # equal for equal prompts of one scope: `prompt_key`
LATE_TURNS = 256  # the latest, whose first tokens give the share of late ones


def prompt_key(namespace: str, fields: ProgramFields, prompt: HashedPrompt, block_tokens: int) -> PromptKey:
    """Of a prompt whose whole blocks of `block_tokens` have a hash that covers all before it."""
    tokens, hashes = prompt.num_prompt_tokens, prompt.block_hashes
    blocks = min(tokens // block_tokens, len(hashes))
    tail = tail_of(prompt, max(blocks, tokens // block_tokens) * block_tokens, tokens)
    return (namespace, *fields.scope, tokens, hashes[blocks - 1] if blocks else None, *tail)


@dataclass(slots=True)
class Turn:
    id: TurnId
    program: Program
    fields: ProgramFields
    arrival_s: float
    priority: int
    may_be_linked: bool = False  # without a name it may be a turn of a program
    link: ProgramLink | None = None  # to the turn that it continues
    prompt: PromptKey = ()
    has_all_input: bool = False  # of a streaming session whose client has no more
    refused_s: float | None = None  # when it was first in the queue and there were no blocks
    started_s: float | None = None
    first_token_s: float | None = None  # from its arrival
    gpu_tokens: int = 0  # of the prompt, found in vLLM's prefix cache
    loaded_tokens: int = 0  # of the prompt, loaded by the connector

    @property
    def in_line(self) -> bool:
        return self.program.stage is Stage.IN_LINE

    @property
    def found_tokens(self) -> int:
        return self.gpu_tokens + self.loaded_tokens

    @property
    def running_rank(self) -> tuple[bool, int, float, float]:
        """The order in which turns keep scarce memory. Last steps end soon, so they are first."""
        return (not self.fields.is_last_step, self.priority, self.program.order_s, self.arrival_s)

    def queue_entry(self, preempted: bool, pinned: bool) -> QueueEntry:
        """The values that its place in the waiting queue may depend on."""
        return QueueEntry(
            preempted=preempted,
            pinned=pinned,
            priority=self.priority,
            program_arrival_s=self.program.arrival_s,
            turn_arrival_s=self.arrival_s,
            program_order_s=self.program.order_s,
            attained_tokens=self.program.attained_tokens,
        )


class TurnTable(dict[TurnId, Turn]):
    """Live turns by id: one record each. `drop` is the whole clean-up."""

    def __init__(self) -> None:
        super().__init__()
        self.by_prompt: dict[PromptKey, TurnId] = {}  # programs' turns, of equal prompts the latest
        self.to_rekey: set[TurnId] = set()  # waiting turns whose key in the queue is out of date
        self.preempted: set[TurnId] = set()  # turns that ran and do not run now
        self.refused_memory: set[TurnId] = set()  # waiting turns that got no blocks
        self.without_token: set[TurnId] = set()  # turns that ran and have not generated a token
        self._first_tokens_s = deque[float](maxlen=LATE_TURNS)  # of the latest turns, from their arrivals
        self._not_run: dict[TurnId, float] = {}  # when those came that have not run, in order

    def __setitem__(self, turn_id: TurnId, turn: Turn) -> None:
        super().__setitem__(turn_id, turn)
        self._not_run[turn_id] = turn.arrival_s

    def start(self, now_s: float, turn: Turn) -> None:
        turn.started_s = now_s
        self._not_run.pop(turn.id, None)
        self.without_token.add(turn.id)

    def drop(self, turn_id: TurnId) -> Turn | None:
        """Drop a turn that has ended; None: it was not known."""
        self.preempted.discard(turn_id)
        self.refused_memory.discard(turn_id)
        self.without_token.discard(turn_id)
        self._not_run.pop(turn_id, None)
        turn = self.pop(turn_id, None)
        if turn is not None and self.by_prompt.get(turn.prompt) == turn_id:
            del self.by_prompt[turn.prompt]
        return turn

    def on_output(self, now_s: float, places: dict[str, int], sampled: Sequence[Sized]) -> None:
        """A step ended: note the turns that generated their first token in it. `sampled`: the tokens of each
        request, at its place."""
        if not sampled:
            return
        for turn_id in [t for t in self.without_token if t in places and len(sampled[places[t]])]:
            self.without_token.discard(turn_id)
            first_token_s = now_s - self[turn_id].arrival_s
            self[turn_id].first_token_s = first_token_s
            self._first_tokens_s.append(first_token_s)

    def late_share(self, limit_s: float) -> float:
        """The share of the latest turns whose first token came later than `limit_s`: 0 to 1. With a limit of
        0, which stands for none, it is 0."""
        return sum(s > limit_s > 0.0 for s in self._first_tokens_s) / max(1, len(self._first_tokens_s))

    @property
    def waiting(self) -> int:
        """How many turns have not run yet."""
        return len(self._not_run)

    def longest_wait_s(self, now_s: float) -> float:
        """For how long the oldest turn that has not run has waited; 0 if there is none."""
        return now_s - next(iter(self._not_run.values()), now_s)
