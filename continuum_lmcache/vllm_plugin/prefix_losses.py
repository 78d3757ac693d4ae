"""Finds what programs lose between their turns: from vLLM's requests to divergence.py and the recorder.

Reads, on vLLM 0.30 to 0.33: Request.all_token_ids, .block_hashes, .num_prompt_tokens, as
programs/prompt_linker.py does.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.request import Request

from continuum_lmcache.programs.divergence import EndedTurn, PrefixLoss, TurnKind
from continuum_lmcache.programs.ended_turns import EndedTurns
from continuum_lmcache.programs.identity import program_id
from continuum_lmcache.reload.load_policy import LoadPolicy
from continuum_lmcache.reload.rate_calibration import CalibratedCosts
from continuum_lmcache.telemetry.events import EventBus, PrefixLost, ProgramEnded
from continuum_lmcache.types import Residency
from continuum_lmcache.vllm_plugin.requests import TurnState

MOST_CHARS = 80


class PrefixLossReporter:
    """Compares each prompt with its program's last turn, and publishes what was lost."""

    def __init__(
        self,
        events: EventBus,
        load_policy: LoadPolicy,
        rates: CalibratedCosts,
        block_tokens: int,
        tokenizer: Any | None,
    ) -> None:
        self.ended_turns = EndedTurns(block_tokens)
        self._events, self._load_policy, self._rates = events, load_policy, rates
        events.subscribe(ProgramEnded, lambda event: self.ended_turns.drop(event.program))
        self._tokenizer = tokenizer  # None: texts are private

    def on_arrival(self, turn: TurnState, request: Request) -> None:
        """A program's next turn is here."""
        assert turn.program is not None
        turn.divergence = self.ended_turns.compare_return(
            turn.program, name_of(turn), request.all_token_ids, request.block_hashes, turn.fields.tools
        )

    def on_first_run(self, now_s: float, turn: TurnState) -> None:
        """The turn runs, with the tokens found of its prompt."""
        assert turn.program is not None
        found_tokens = turn.gpu_tokens + turn.loaded_tokens
        is_declined = self._load_policy.has_declined(turn.id)
        curve = self._rates.costs.prefill
        for loss in self.ended_turns.count_losses(turn.divergence, found_tokens, is_declined, curve):
            self._events.publish(PrefixLost(now_s, turn.program, turn.id, loss, self._texts(loss)))

    def on_pause(self, turn: TurnState, request: Request, kind: TurnKind, tiers: Residency) -> None:
        """The turn ended in a tool call."""
        assert turn.program is not None
        self.ended_turns.add(
            turn.program,
            EndedTurn(
                name_of(turn),
                request.all_token_ids,
                request.block_hashes,
                request.num_prompt_tokens,
                turn.fields.tools,
                kind,
                tiers.dram_tokens + tiers.ssd_tokens,
            ),
        )

    def _texts(self, loss: PrefixLoss) -> tuple[str, ...]:
        """The texts of the two excerpts, cut; nothing where texts are private."""
        if self._tokenizer is None:
            return ()
        try:
            return tuple(
                str(self._tokenizer.decode(list(tokens)))[:MOST_CHARS]
                for tokens in (loss.last_turn_excerpt, loss.prompt_excerpt)
            )
        except LookupError:  # a token that the tokenizer does not know (requests.tail_text)
            return ()


def name_of(turn: TurnState) -> str:
    """The client's name of the program, whatever its cache_salt."""
    fields = turn.fields
    return str(turn.program) if fields.job_id is None else program_id(fields.job_id, fields.owner)
