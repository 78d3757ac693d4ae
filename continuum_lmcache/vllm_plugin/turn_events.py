"""Tells the engine what happens to vLLM's requests, and carries out what it decides.

Reads, on vLLM 0.30 to 0.33: Request.num_prompt_tokens, .num_tokens, .num_output_tokens,
.num_computed_tokens, .num_preemptions, .status.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from vllm.v1.request import Request, RequestStatus

from continuum_lmcache.engine import Occupancy, ToolCall, TurnEnd
from continuum_lmcache.programs.turns import Turn
from continuum_lmcache.telemetry.events import Event, EvictFirst, PinReleased, PinTaken, ProgramAdmitted
from continuum_lmcache.types import PinEnd, ProgramId, TurnId
from continuum_lmcache.vllm_plugin.assembly import EngineParts
from continuum_lmcache.vllm_plugin.memory.residency import add_sources
from continuum_lmcache.vllm_plugin.requests import is_end_of_turn, new_turn


class TurnEvents:
    """One scheduler's requests as turns, from arrival to end."""

    def __init__(self, parts: EngineParts) -> None:
        self._engine, self._blocks, self._step_timer = parts.engine, parts.blocks, parts.step_timer
        engine, self._residency, self._store = parts.engine, parts.residency, parts.residency.store
        self._turns, self._programs, self._pins = engine.turns, engine.programs, engine.pins
        self._load_policy = engine.load_policy
        self.tool_calls, self._ignored, self._samples = parts.tool_calls, parts.ignored, parts.samples
        self._from_rust = parts.from_rust
        self._recorder = parts.files.recorder

    def carry_out(self, events: Iterable[Event]) -> None:
        """Do what was decided, in its order. Metrics and recording get the same list."""
        for event in events:
            match event:
                case PinTaken():
                    self._blocks.to_hold = event.pin.block_ids
                    self._rekey(event.program)
                case PinReleased():
                    if event.why is not PinEnd.RECLAIMED:  # a request has these blocks already
                        self._blocks.release(event.block_ids)
                    self._rekey(event.program)
                case EvictFirst():
                    self._blocks.note_ended(event.turn, event.shared_tokens)
                case ProgramAdmitted():
                    self._turns.to_rekey.add(event.turn)
            self._samples.add(event)
            if self._recorder is not None:
                self._recorder.record(event)

    def _rekey(self, program: ProgramId) -> None:
        """The place of the program's turn in the queue has changed, also if it is preempted."""
        record = self._programs.records.get(program)
        if record is not None and record.turn is not None:
            self._turns.to_rekey.add(record.turn)

    def step(self, now_s: float, is_running: bool, is_queued: bool, prompt_share: float) -> None:
        occupancy = Occupancy(is_running, is_queued, prompt_share, self._blocks.free_count)
        self.carry_out(self._engine.tick(now_s, occupancy))
        if self._engine.is_refresh_due(now_s):
            tier_tokens = self._store.capacity_tokens()
            self.carry_out(self._engine.refresh(now_s, self._blocks.kv_tokens, tier_tokens))

    # a request's life ------------------------------------------------------

    def arrived(self, now_s: float, request: Request) -> None:
        new, ignored = new_turn(request, self._engine.config, self._from_rust)
        self._ignored.update(ignored)
        self.carry_out(self._engine.turn_arrived(now_s, new, request))

    def on_allocated(self, request: Request, gpu_tokens: int, loaded_tokens: int) -> None:
        """A waiting request got its blocks; of its prompt some tokens were cached, and some are loaded."""
        turn = self._turns[TurnId(request.request_id)]
        turn.gpu_tokens, turn.loaded_tokens = gpu_tokens, loaded_tokens
        self._load_policy.on_allocated(turn.id)

    def on_load_done(self, request: Request) -> None:
        """An asynchronous load has ended; the tokens that now count as computed were loaded."""
        turn = self._turns[TurnId(request.request_id)]
        came = max(0, request.num_computed_tokens - turn.gpu_tokens)
        turn.loaded_tokens = min(turn.loaded_tokens, came)

    def ran(self, now_s: float, request: Request) -> None:
        turn = self._turns[TurnId(request.request_id)]
        if turn.started_s is not None:
            return
        self._step_timer.on_run(turn)
        residency, program, uses_pin = self._residency, turn.program, False
        served = residency.served_from(request, turn)
        add_sources(residency.prompt_tokens, served, served.total_tokens)
        if not program.is_one_turn:
            returned_tokens = min(program.last_tokens, served.total_tokens)
            add_sources(residency.returned_tokens, served, returned_tokens)
            pin = self._pins.pinned.get(program.id)
            uses_pin = pin is not None and self._blocks.is_used_by(request.request_id, pin.block_ids)
        self.carry_out(self._engine.turn_ran(now_s, turn, request, served, uses_pin))

    def preempted(self, now_s: float, turn_ids: Iterable[str]) -> None:
        for turn in [self._turns[TurnId(i)] for i in turn_ids if i in self._turns]:
            self.carry_out(self._engine.turn_preempted(now_s, turn))

    def resumed(self, now_s: float, scheduled: Container[str], requests: Mapping[str, Request]) -> None:
        """Note the preempted turns that run again in this step."""
        for turn in [self._turns[i] for i in self._turns.preempted if i in scheduled]:
            self._step_timer.on_run(turn)
            served = self._residency.served_from(requests[turn.id], turn)
            self.carry_out(self._engine.turn_resumed(now_s, turn, served))

    def ended(self, now_s: float, request: Request) -> None:
        turn = self._turns.drop(TurnId(request.request_id))
        if turn is not None:
            end = self._end_of(turn, request)
            self.carry_out(self._engine.turn_ended(now_s, turn, request, end))

    def _end_of(self, turn: Turn, request: Request) -> TurnEnd:
        blocks, tokens = self._blocks, request.num_tokens
        blocks.on_turn_end(request.request_id, request.num_computed_tokens)
        is_end, call = is_end_of_turn(request) or turn.has_all_input, None
        if self._engine.ends_in_call(turn, is_end):
            named, offers_tools = turn.fields.this_tool, bool(turn.fields.tools)
            call = ToolCall(
                (named,) if named else self.tool_calls.read(request, offers_tools, self._ignored),
                self._residency.after_eviction(request, tokens),
                blocks.pinnable(request, tokens),
                blocks.free_count(),
            )
        return TurnEnd(is_end, tokens, request.num_output_tokens, call)

    def on_reclaimed(self, now_s: float, programs: Sequence[ProgramId]) -> None:
        """A request got blocks of these programs' pins."""
        self.carry_out(self._engine.release_pins(now_s, programs, PinEnd.RECLAIMED))

    def released(self, now_s: float, program: ProgramId) -> None:
        self.carry_out(self._engine.program_released(now_s, program))

    def release_all_pins(self, now_s: float) -> None:
        """Before a cache reset, sleep or shutdown."""
        self.carry_out(self._engine.release_pins(now_s, list(self._pins.pinned), PinEnd.RESET))

    # order -----------------------------------------------------------------

    def queue_key(self, request: Request) -> tuple[Any, ...]:
        """The request's place in the waiting queue: requests that hold memory first: others wait for it."""
        turn = self._turns[TurnId(request.request_id)]
        preempted = request.num_preemptions > 0  # its status does not show it while its KV is loaded back
        order = self._engine.order(turn, preempted)
        holds = request.num_computed_tokens > 0 or request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        unready = turn.in_line or request.status is RequestStatus.WAITING_FOR_STREAMING_REQ
        return (unready, not holds, *order, turn.arrival_s, turn.id)
