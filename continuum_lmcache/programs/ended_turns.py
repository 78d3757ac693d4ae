"""The last turns of paused programs: the next prompt of each is compared with them to find lost prefixes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from continuum_lmcache.programs.divergence import (
    FEW_TOKENS,
    Divergence,
    EndedTurn,
    LossCause,
    PrefixLoss,
    divergence_of,
    losses_of,
    same_blocks,
)
from continuum_lmcache.reload.cost_model import PrefillCurve
from continuum_lmcache.types import ProgramId

MOST_TOKENS = 2_000_000  # of all turns, about 80 MB; beyond it the longest-paused programs' turns are dropped
CAUSES = [cause.value for cause in LossCause]
KEPT_TURNS = 2  # of a program: a request in between, as for a title, does not replace the turn before it


@dataclass(slots=True)
class EndedTurns:
    """The last turns of paused programs, and the tokens lost since the start, by cause.

    A program's `name` is the client's; programs under different salts may share it.
    """

    block_tokens: int  # covered by one hash
    returns: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    at_token: dict[str, float] = field(default_factory=dict)  # of the latest
    _turns: OrderedDict[ProgramId, list[EndedTurn]] = field(default_factory=OrderedDict)
    _latest: dict[str, ProgramId] = field(default_factory=dict)  # by name
    _tokens: int = 0

    @property
    def slack_tokens(self) -> int:
        """A block at either end does not count as lost."""
        return 2 * self.block_tokens

    def add(self, program: ProgramId, turn: EndedTurn) -> None:
        """A turn ended, and its program continues."""
        turns = self._turns.setdefault(program, [])
        self._turns.move_to_end(program)
        self._latest[turn.name] = program
        turns.append(turn)
        self._tokens += len(turn.tokens)
        while len(turns) > KEPT_TURNS:
            self._remove(program, turns[0])
        while self._tokens > MOST_TOKENS and len(self._turns) > 1:
            self.drop(next(iter(self._turns)))

    def compare_return(
        self, program: ProgramId, name: str, tokens: Sequence[int], hashes: Sequence[Hashable], tools: str
    ) -> Divergence | None:
        """How far the program's next prompt repeats its last turn. None: no turn is known.

        Of the kept turns the one with the most blocks in common with the prompt is used, the latest among
        equals. A turn that the prompt repeats for the most part is dropped. For a program that is new under
        its salt, a turn of another program of that name counts if it begins with the same tokens, and stays.
        """
        turns = self._turns.get(program)
        is_own = turns is not None
        if turns is None:
            namesakes = self._turns.get(self._latest.get(name, program), ())
            turns = [turn for turn in namesakes if have_common_head(turn.tokens, tokens)]
        if not turns:
            return None
        blocks, _, turn = max((same_blocks(d.hashes, hashes), n, d) for n, d in enumerate(turns))
        if is_own and 2 * blocks * self.block_tokens >= len(turn.tokens):
            self._remove(program, turn)
        return divergence_of(turn, tokens, tools, blocks * self.block_tokens, self.block_tokens)

    def count_losses(
        self, divergence: Divergence | None, found_tokens: int, is_declined: bool, curve: PrefillCurve
    ) -> list[PrefixLoss]:
        """Counts what a returning prompt lost, as it begins to run with `found_tokens` in the cache.

        `is_declined`: a tier held more, and computing it was cheaper than loading.
        """
        if divergence is None:
            return []
        losses = list(losses_of(divergence, found_tokens, is_declined, self.slack_tokens, curve))
        for loss in losses:
            cause = loss.cause.value
            self.returns[cause] += 1
            self.seconds[cause] += loss.seconds
            self.at_token[cause] = loss.at_token
        return losses

    def drop(self, program: ProgramId) -> None:
        for turn in list(self._turns.get(program, ())):
            self._remove(program, turn)
        self._turns.pop(program, None)

    def _remove(self, program: ProgramId, turn: EndedTurn) -> None:
        """Drop one turn, and its name if no other turn of the program has it."""
        turns = self._turns[program]
        turns.remove(turn)
        self._tokens -= len(turn.tokens)
        if self._latest.get(turn.name) == program and all(kept.name != turn.name for kept in turns):
            del self._latest[turn.name]

    def totals(self) -> dict[str, dict[str, float]]:
        return {
            "lost_returns": dict(self.returns),
            "lost_seconds": dict(self.seconds),
            "lost_at_token": dict(self.at_token),
        }


def have_common_head(left: Sequence[int], now: Sequence[int]) -> bool:
    """Whether two texts have so much of their beginning in common that one continues the other."""
    return len(left) >= FEW_TOKENS and list(left[:FEW_TOKENS]) == list(now[:FEW_TOKENS])
