"""Records a replica's turns in ReplicaPrograms: the turn of each prompt, its first token and its end.

vLLM itself is in vllm_plugin/watched_server.py. Seam on Ray 2.60: the request context's session_id and
_internal_request_id.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray.serve.context import _get_serve_request_context

from continuum_lmcache.programs.identity import MOST_AGE_S, MOST_TURNS
from continuum_lmcache.serve.names import TurnName
from continuum_lmcache.serve.replica_programs import ReplicaPrograms
from continuum_lmcache.types import ProgramId, TurnId

PROGRESS = ("program_turns", "program_age_s")  # the engine's fields (identity.FIELDS)


@dataclass(frozen=True, slots=True)
class TurnPrompt:
    """A prompt of a turn that the router sent here (watched_server.Prompt)."""

    programs: ReplicaPrograms
    key: TurnId
    turn: TurnName

    @classmethod
    def of_this_request(cls, programs: ReplicaPrograms) -> TurnPrompt:
        """The prompt of the request whose task this is."""
        context = _get_serve_request_context()
        return cls(programs, TurnId(context._internal_request_id), TurnName.parse(context.session_id))

    def on_start(self, sampling_params: Any) -> None:
        """Pass on to the engine what the program did elsewhere."""
        turn = self.turn
        program = ProgramId(turn.program or f"~{self.key}")
        self.programs.on_start(time.monotonic(), self.key, program, turn.turns, turn.age_s)
        sampling_params.extra_args = with_progress(sampling_params.extra_args, turn)

    def on_first_token(self, prompt_tokens: int) -> None:
        self.programs.on_first_token(self.key, prompt_tokens, self.turn.body_bytes)

    def on_stop(self, context_tokens: int) -> None:
        self.programs.on_stop(self.key, context_tokens, self.turn.is_last or not self.turn.program)


def with_progress(extra_args: Mapping[str, Any] | None, turn: TurnName) -> dict[str, Any] | None:
    """A request's fields with its program's progress, from the fleet and not from the client.

    An engine refuses all fields of a request if one is above its bound.
    """
    kept = {name: value for name, value in (extra_args or {}).items() if name not in PROGRESS}
    if turn.turns:
        progress = min(turn.turns, MOST_TURNS), round(min(turn.age_s, MOST_AGE_S))
        kept |= dict(zip(PROGRESS, progress, strict=True))
    return kept or None
