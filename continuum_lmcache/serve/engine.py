"""Records a replica's turns in ReplicaPrograms: the turn of each prompt, its first token and its end.

vLLM itself is in vllm_plugin/watched_server.py. Seams: the request context's session_id and
_internal_request_id, on Ray 2.60; the request id of a Responses answer, on vLLM 0.32.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray.serve.context import _get_serve_request_context

from continuum_lmcache.programs.identity import MOST_AGE_S, MOST_TURNS
from continuum_lmcache.serve import gauges
from continuum_lmcache.serve.names import TurnName, hidden
from continuum_lmcache.serve.replica_programs import ReplicaPrograms
from continuum_lmcache.types import ProgramId, TurnId

PROGRESS = ("program_turns", "program_age_s")  # the engine's fields (identity.FIELDS)
RESPONSE = re.compile(r"(resp_\w+?)(?:_\d+)?")  # a stored answer's id, then the number of the prompt


@dataclass(frozen=True, slots=True)
class TurnPrompt:
    """A prompt of a turn that the router sent here (watched_server.Prompt). `key`: of the programs' names."""

    programs: ReplicaPrograms
    key: bytes
    turn: TurnId
    name: TurnName

    @classmethod
    def of_this_request(cls, programs: ReplicaPrograms, key: bytes) -> TurnPrompt:
        """The prompt of the request whose task this is."""
        context = _get_serve_request_context()
        return cls(programs, key, TurnId(context._internal_request_id), TurnName.parse(context.session_id))

    def on_start(self, sampling_params: Any, prompt_tokens: int, request_id: str) -> None:
        """Pass on to the engine what the program did elsewhere."""
        name, response = self.name, RESPONSE.fullmatch(request_id)
        program = ProgramId(name.program or f"~{self.turn}")
        answer = hidden(response[1], self.key) if response else None
        self.programs.on_start(
            time.monotonic(), self.turn, program, name.turns, name.age_s, prompt_tokens, answer
        )
        gauges.turns.labels(name.why).inc()
        sampling_params.extra_args = with_progress(sampling_params.extra_args, name)

    def on_first_token(self) -> None:
        self.programs.on_first_token(self.turn)

    def on_stop(self, context_tokens: int) -> None:
        self.programs.on_stop(self.turn, context_tokens, self.name.is_last or not self.name.program)


def with_progress(extra_args: Mapping[str, Any] | None, turn: TurnName) -> dict[str, Any] | None:
    """A request's fields with its program's progress, from the fleet and not from the client.

    An engine refuses all fields of a request if one is above its bound.
    """
    kept = {name: value for name, value in (extra_args or {}).items() if name not in PROGRESS}
    if turn.turns:
        progress = min(turn.turns, MOST_TURNS), round(min(turn.age_s, MOST_AGE_S))
        kept |= dict(zip(PROGRESS, progress, strict=True))
    return kept or None
