"""ThunderAgent's gate in front of an engine, as llm-d-router's plugin has it (llm-d/llm-d-router#3076).

A session's footprint is its context, from its first turn on. Footprints that are not paused share the GPU's
KV cache. The next turn of a session that is not paused passes at once. New sessions and paused ones wait for
room, paused ones first, each in the order of arrival. Room comes from sessions that have been idle for
IDLE_LEASE_S, longest idle first: they are paused. Whoever has waited for BACKSTOP_S passes without room.

From the descriptions of steps 17, 18, 23 and 24 of github.com/zetxqx/thunderagent-original-verification, with
their settings. Left out: several pods, prompts sized by their bytes, and sessions that are forgotten after
an hour.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.v1.request import Request

from experiments.sim.clock import Timetable, VirtualClock

IDLE_LEASE_S = 30.0
BACKSTOP_S = 1800.0


@dataclass(slots=True)
class Session:
    """What the gate knows of a session."""

    tokens: int = 0  # of its context
    idle_since_s: float | None = None  # None: a turn is under way, or waits
    is_paused: bool = True  # as it is before its first turn passes


class Gate:
    """`admit` hands a turn to the engine, which has room for `capacity_tokens`."""

    def __init__(
        self,
        capacity_tokens: int,
        clock: VirtualClock,
        timetable: Timetable,
        admit: Callable[[Request], None],
    ) -> None:
        self.capacity_tokens, self.clock, self.timetable, self.admit = (
            capacity_tokens,
            clock,
            timetable,
            admit,
        )
        self.sessions: dict[str, Session] = {}
        self.asked: dict[str, Request] = {}  # turns that passed
        self.paused: deque[Request] = deque()  # turns that wait for room, the oldest first
        self.new: deque[Request] = deque()

    @property
    def used_tokens(self) -> int:
        """Footprints of the sessions that are not paused."""
        return sum(session.tokens for session in self.sessions.values() if not session.is_paused)

    def arrive(self, request: Request) -> None:
        """A turn comes."""
        name = name_of(request)
        session = self.sessions.setdefault(name, Session())
        if session.is_paused:
            (self.paused if session.tokens else self.new).append(request)
            session.idle_since_s = None
            self.timetable.at(self.clock.now_s + BACKSTOP_S, self.let_in)
        else:
            self._pass(request)
            self._make_room(0)
        self.let_in()

    def heard(self, said: Any) -> None:
        """The engine has said something of a turn."""
        if said.finish_reason is None or said.request_id not in self.asked:
            return
        request = self.asked.pop(said.request_id)
        session = self.sessions[name_of(request)]
        session.tokens, session.idle_since_s = (
            request.num_prompt_tokens + request.max_tokens,
            self.clock.now_s,
        )
        self.timetable.at(self.clock.now_s + IDLE_LEASE_S, self.let_in)

    def let_in(self) -> None:
        """Let waiting turns pass while there is room."""
        while queue := self.paused or self.new:
            starving = [q for q in (self.paused, self.new) if q and self._starves(q[0])]
            queue = starving[0] if starving else queue
            if not (starving or self._make_room(queue[0].num_prompt_tokens)):
                return
            self._pass(queue.popleft())

    def close(self) -> None:
        """Whoever waits has gone."""
        self.paused.clear()
        self.new.clear()

    def _starves(self, request: Request) -> bool:
        return bool(self.clock.now_s >= request.arrival_time + BACKSTOP_S)

    def _make_room(self, tokens: int) -> bool:
        """Pause idle sessions until so many tokens fit; whether they do. None is paused in vain."""
        lacking = self.used_tokens + tokens - self.capacity_tokens
        until_s = self.clock.now_s - IDLE_LEASE_S
        idle = [s for s in self.sessions.values() if not s.is_paused and s.idle_since_s is not None]
        idle = sorted((s for s in idle if s.idle_since_s <= until_s), key=lambda s: s.idle_since_s)
        if tokens and lacking > sum(session.tokens for session in idle):
            return False
        for session in idle:
            if lacking <= 0:
                break
            session.is_paused, lacking = True, lacking - session.tokens
        return True

    def _pass(self, request: Request) -> None:
        session = self.sessions[name_of(request)]
        session.is_paused, session.idle_since_s = False, None
        session.tokens = max(session.tokens, request.num_prompt_tokens)
        self.asked[request.request_id] = request
        self.admit(request)


def name_of(request: Request) -> str:
    """The session that the client names."""
    return str(request.sampling_params.extra_args["job_id"])
