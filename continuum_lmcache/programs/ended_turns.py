"""The turns that programs left, for as long as they are away: what their returns are compared with."""

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
    losses_of,
    parting,
    same_blocks,
)
from continuum_lmcache.reload.cost_model import PrefillCurve
from continuum_lmcache.types import ProgramId

MOST_TOKENS = 2_000_000  # of all turns, about 80 MB; those of the programs longest away are forgotten
CAUSES = [cause.value for cause in LossCause]
KEPT_TURNS = 2  # of a program: one request in between, a title's say, does not hide the turn before it


@dataclass(slots=True)
class EndedTurns:
    """The turns that programs left, and what was lost of them since the start, by cause.

    A program's `name` is that of its client, which programs under several salts may share.
    """

    block_tokens: int  # that one hash adds
    returns: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    at_token: dict[str, float] = field(default_factory=dict)  # of the latest
    _left: OrderedDict[ProgramId, list[EndedTurn]] = field(default_factory=OrderedDict)
    _latest: dict[str, ProgramId] = field(default_factory=dict)  # by name
    _tokens: int = 0

    @property
    def slack_tokens(self) -> int:
        """A block at either end is no loss."""
        return 2 * self.block_tokens

    def left(self, program: ProgramId, departure: EndedTurn) -> None:
        """A turn ended, and its program goes on."""
        turns = self._left.setdefault(program, [])
        self._left.move_to_end(program)
        self._latest[departure.name] = program
        turns.append(departure)
        self._tokens += len(departure.tokens)
        while len(turns) > KEPT_TURNS:
            self._tokens -= len(turns.pop(0).tokens)
        while self._tokens > MOST_TOKENS and len(self._left) > 1:
            self.over(next(iter(self._left)))

    def back(
        self, program: ProgramId, name: str, tokens: Sequence[int], hashes: Sequence[Hashable], tools: str
    ) -> Divergence | None:
        """The program's next prompt is here. None: the turn before is not known.

        Of the turns kept that one counts which the prompt follows furthest, the latest among equals. One that
        it follows for the most part is superseded. Of a program new under its salt that one of the same name
        counts which begins with the same tokens.
        """
        turns = self._left.get(program)
        if turns is None:
            namesakes = self._left.get(self._latest.get(name, program), ())
            turns = [turn for turn in namesakes if begins_alike(turn.tokens, tokens)]
        if not turns:
            return None
        blocks, _, turn = max((same_blocks(d.hashes, hashes), n, d) for n, d in enumerate(turns))
        if 2 * blocks * self.block_tokens >= len(turn.tokens):
            turns.remove(turn)
            self._tokens -= len(turn.tokens)
        return parting(turn, tokens, tools, blocks * self.block_tokens, self.block_tokens)

    def found(
        self, parted: Divergence | None, found_tokens: int, is_declined: bool, curve: PrefillCurve
    ) -> list[PrefixLoss]:
        """The prompt of a return begins to run, and so much of it was found; `is_declined`: a tier had more,
        and computing was cheaper. What it lost, counted.
        """
        if parted is None:
            return []
        losses = list(losses_of(parted, found_tokens, is_declined, self.slack_tokens, curve))
        for loss in losses:
            cause = loss.cause.value
            self.returns[cause] += 1
            self.seconds[cause] += loss.seconds
            self.at_token[cause] = loss.at_token
        return losses

    def over(self, program: ProgramId) -> None:
        """Nothing of the program is waited for."""
        turns = self._left.pop(program, [])
        self._tokens -= sum(len(turn.tokens) for turn in turns)
        for name in {turn.name for turn in turns}:
            if self._latest.get(name) == program:
                del self._latest[name]

    def totals(self) -> dict[str, dict[str, float]]:
        """For the metrics."""
        return {
            "lost_returns": dict(self.returns),
            "lost_seconds": dict(self.seconds),
            "lost_at_token": dict(self.at_token),
        }


def begins_alike(left: Sequence[int], now: Sequence[int]) -> bool:
    """Whether two texts share so much of their beginning that one goes on from the other."""
    return len(left) >= FEW_TOKENS and list(left[:FEW_TOKENS]) == list(now[:FEW_TOKENS])
