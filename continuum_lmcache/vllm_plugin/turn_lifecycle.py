"""A request's life as a turn of a program, from arrival to end, and its KV in between.

It asks advisor, admission and load policy for decisions. Recorder and metrics subscribe to its events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request, RequestStatus

from continuum_lmcache.admission.controller import AdmissionController, KVCapacity
from continuum_lmcache.admission.shared_prefixes import SharedPrefixIndex
from continuum_lmcache.programs.divergence import SLACK_BLOCKS, losses_of
from continuum_lmcache.programs.end_claims import EndClaim, EndClaims
from continuum_lmcache.programs.identity import program_id
from continuum_lmcache.programs.prompt_linker import PromptLinker
from continuum_lmcache.programs.table import Program, ProgramTable
from continuum_lmcache.reload.load_policy import Contention, LoadPolicy
from continuum_lmcache.retention.advisor import RetentionAdvisor
from continuum_lmcache.retention.pin_table import PinTable
from continuum_lmcache.retention.queue_order import LONGEST_WAIT_S
from continuum_lmcache.telemetry.events import (
    EventBus,
    PinReleased,
    PinTaken,
    PrefixLost,
    ProgramEnded,
    TurnArrived,
    TurnFinished,
    TurnPreempted,
    TurnStarted,
)
from continuum_lmcache.telemetry.recorder import EventRecorder
from continuum_lmcache.telemetry.samples import MetricSamples
from continuum_lmcache.types import MOST_PROGRAMS, EngineLoad, FinishedTurn, PinEnd, ProgramId, TurnId
from continuum_lmcache.vllm_plugin.memory.gpu_blocks import GpuBlocks
from continuum_lmcache.vllm_plugin.memory.residency import ResidencyLookup
from continuum_lmcache.vllm_plugin.requests import TurnState, TurnTable, is_end_of_turn, turn_state_of
from continuum_lmcache.vllm_plugin.step_timer import StepTimer
from continuum_lmcache.vllm_plugin.tool_calls import ToolCallReader

REFRESH_S = 10.0


class TurnLifecycle:
    """One engine's programs, turns and pins: how each event of a request changes the tables."""

    def __init__(
        self,
        advisor: RetentionAdvisor,
        recorder: EventRecorder,
        kv_cache_manager: KVCacheManager,
        hash_block_tokens: int,
        block_tokens: int,
        tool_calls: ToolCallReader,
        residency: ResidencyLookup,
    ) -> None:
        self.advisor, self.recorder, self.residency = advisor, recorder, residency
        self.config = config = advisor.config
        self.pool_blocks = kv_cache_manager.block_pool.num_gpu_blocks
        self.events, self.samples = EventBus(), MetricSamples()
        self.turns, self.programs = TurnTable(), ProgramTable(MOST_PROGRAMS)
        self.blocks = GpuBlocks(kv_cache_manager, block_tokens)
        budget = int(self.pool_blocks * config.max_pinned_share)
        self.pins: PinTable[KVCacheBlock] = PinTable(
            self.programs.records,
            self.blocks,
            budget,
            int(budget * config.max_tenant_share),
            config.max_ttl_s,
            self.events.publish,
        )

        def contention() -> Contention:
            return Contention(len(self.turns) - 1, self.kv_tokens)

        def favors_started() -> bool:
            return not residency.has_tiers or advisor.favors_started()

        self.load_policy = LoadPolicy(advisor.rates, contention, advisor.features.load_or_recompute)
        self._hash_block_tokens = hash_block_tokens
        self._slack_tokens = SLACK_BLOCKS * hash_block_tokens
        self.step_timer = StepTimer(advisor.rates, residency)
        self._shared_prefixes = SharedPrefixIndex(hash_block_tokens)
        self.admission = AdmissionController(
            self._kv_capacity(),
            config.admission_max_hold_s,
            shared_prefixes=self._shared_prefixes,
            favors_started=favors_started,
        )
        self.end_claims = EndClaims()
        self.ignored: Counter[str] = Counter()
        self._prompt_linker = PromptLinker(MOST_PROGRAMS, hash_block_tokens)
        self.tool_calls = tool_calls
        self._refresh_at_s = 0.0
        advisor.listen(self.events)
        self.samples.listen(self.events)
        self.events.subscribe(PinTaken, lambda event: self._rekey(event.pin.program))
        self.events.subscribe(PinReleased, lambda event: self._rekey(event.program))

    # a turn's life ---------------------------------------------------------

    def on_arrival(self, now_s: float, request: Request) -> None:
        """A request joins the queue: find its program, and learn from its tool gap."""
        turn, ignored = turn_state_of(now_s, request, self.config)
        for field in ignored:
            self.ignored[field] += 1
        job_id = turn.fields.job_id
        program = program_id(job_id, turn.tenant) if job_id is not None else None
        if is_further := program is not None and self._has_live_turn(program):
            turn.fields, program = replace(turn.fields, job_id=None), None
        if program is not None:
            self._bind_program(turn, request, program, None)
        elif self._may_be_linked(request) and (link := self._prompt_linker.find_link(request, turn.fields)):
            turn.link = link
            self._bind_program(turn, request, link.program, link.arrival_s)
        else:
            name, sizes = anonymous_program(request), (request.num_prompt_tokens, request.block_hashes)
            if is_further and self.config.admission:
                self.admission.on_arrival(
                    now_s, name, sizes[0], turn.priority, hashes=sizes[1], is_one_turn=True
                )
                turn.held = True
            else:
                self.admission.add_request(name, *sizes)
        self.turns[turn.id] = turn

    def _has_live_turn(self, program: ProgramId) -> bool:
        """Whether a further request of that name is no next turn: one of n answers, of a list or a group, or
        other people's. It counts as a request without a name, else they all had the program's place; and it
        waits in admission's line, else new programs would wait there for what is left."""
        entry = self.programs.records.get(program)
        return entry is not None and bool(entry.live)

    def _may_be_linked(self, request: Request) -> bool:
        """Whether a request without a name may be a turn of a program. One token calls no tool: it is a beam
        of a search, or scores a prompt."""
        return self.config.infer_programs and request.max_tokens > 1

    def _bind_program(
        self, turn: TurnState, request: Request, program: ProgramId, since_s: float | None
    ) -> None:
        """Make the turn one of this program's."""
        now_s = turn.arrival_s
        before = self.end_claims.withdraw(program)
        since_s = before.arrival_s if before else since_s
        if turn.fields.turns and since_s is None:  # started elsewhere; its age counts with its turns only
            since_s = now_s - turn.fields.age_s
        back = self.programs.add_turn(now_s, turn.id, program, turn.tenant, since_s)
        if turn.fields.turns > self.programs.records[program].turns:  # that gap was elsewhere
            back = None
        turn.program, entry = program, self.programs.records[program]
        turn.program_arrival_s = entry.arrival_s
        turn.place_s = now_s if self.admission.takes_turns else entry.arrival_s
        entry.turns = max(before.turns if before else entry.turns, turn.fields.turns)
        turns = entry.turns or int(since_s is not None)  # an inferred program's first had no program
        how = (request.num_prompt_tokens, turn.priority, turns, not self.config.admission)
        turn.held = not self.admission.on_arrival(now_s, program, *how, hashes=request.block_hashes)
        if turn.held and turns:  # a conversation that starts anew
            turn.place_s = now_s
        tool, gap_s = ((turn.fields.last_tool or back.tool), back.gap_s) if back is not None else ((), None)
        values = (request.num_prompt_tokens, tool, gap_s, turn.tenant)
        self.events.publish(TurnArrived(now_s, program, turn.id, *values))

    def on_allocated(self, request: Request, gpu_tokens: int, loaded_tokens: int) -> None:
        """A waiting request got its blocks; of its prompt some tokens were cached, and some are loaded."""
        turn = self.turns.get(TurnId(request.request_id))
        if turn is not None:
            turn.gpu_tokens, turn.loaded_tokens = gpu_tokens, loaded_tokens
            self.load_policy.on_allocated(turn.id)

    def on_load_done(self, request: Request) -> None:
        """An asynchronous load has ended; the tokens that now count as computed were loaded."""
        turn = self.turns.get(TurnId(request.request_id))
        if turn is not None:
            came = max(0, request.num_computed_tokens - turn.gpu_tokens)
            turn.loaded_tokens = min(turn.loaded_tokens, came)

    def on_first_run(self, now_s: float, request: Request) -> None:
        """A turn runs for the first time: it holds its own blocks now, so its program's pin ends."""
        turn = self.turns.get(TurnId(request.request_id))
        if turn is None or turn.started_s is not None:
            return
        turn.started_s = now_s
        self.turns.without_token.add(turn.id)
        self.step_timer.on_run(turn)
        served = self.residency.served_from(request, turn)
        self.residency.count(served)
        found_tokens = turn.gpu_tokens + turn.loaded_tokens
        if turn.program is None:
            self.admission.on_prefix_hit(anonymous_program(request), request.block_hashes, found_tokens)
            return
        program, entry = turn.program, self.programs.records[turn.program]
        self.programs.start_turn(turn.id, program)
        self.pins.turn_stopped_waiting(program)
        if not entry.turns and turn.link is None:  # else it found what its own last turn left
            self.admission.on_prefix_hit(program, request.block_hashes, found_tokens)
        context_tokens = min(entry.context_tokens, request.num_prompt_tokens)
        self.residency.count_returned(served, context_tokens)
        evicted = context_tokens - turn.gpu_tokens > self._slack_tokens
        if evicted and not self.load_policy.has_declined(turn.id):  # else less was loaded than was held
            self.advisor.observe_return(entry.residency, served, context_tokens)
        self.events.publish(TurnStarted(now_s, program, turn.id, served, now_s - turn.arrival_s, evicted))
        sizes = (self._hash_block_tokens, entry.context_tokens, request.num_prompt_tokens, found_tokens)
        for loss in losses_of(entry.hashes, request.block_hashes, *sizes):
            self.events.publish(PrefixLost(now_s, program, turn.id, loss))
        if program in self.pins.pinned:
            is_reused = self.blocks.is_used_by(request.request_id, self.pins.blocks(program))
            self.pins.release(now_s, program, PinEnd.REUSED if is_reused else PinEnd.DIVERGED)

    def on_preemption(self, now_s: float, turn_id: TurnId) -> None:
        """A running turn lost its memory and waits again."""
        turn = self.turns.get(turn_id)
        if turn is not None and turn.program is not None:
            self.turns.preempted.add(turn_id)
            self.events.publish(TurnPreempted(now_s, turn.program, turn_id))

    def on_resume(self, now_s: float, scheduled: Container[str], requests: Mapping[str, Request]) -> None:
        """Note the preempted turns that run again in this step."""
        for turn_id in [t for t in self.turns.preempted if t in scheduled]:
            self.turns.preempted.discard(turn_id)
            turn, request = self.turns[turn_id], requests[turn_id]
            self.step_timer.on_run(turn)
            assert turn.program is not None
            served, delay_s = self.residency.served_from(request, turn), now_s - turn.arrival_s
            self.events.publish(TurnStarted(now_s, turn.program, turn_id, served, delay_s, resumed=True))

    def on_finish(self, now_s: float, request: Request) -> None:
        """A request is about to be freed: keep its KV, if it ended a turn and that pays."""
        turn = self.turns.drop(TurnId(request.request_id))
        if turn is None:
            return
        self.blocks.on_turn_end(request.request_id, request.num_computed_tokens)
        self.load_policy.on_turn_end(turn.id)
        ended = is_end_of_turn(request) or turn.has_all_input
        if turn.program is None:
            anonymous = anonymous_program(request)
            self.admission.remove_program(anonymous)
            if ended and self._may_be_linked(request) and not turn.fields.is_last_step:
                self._prompt_linker.add_turn(request, anonymous, turn.arrival_s, fields=turn.fields)
            return
        if turn.started_s is not None:
            computed_tokens = request.num_tokens - turn.gpu_tokens - turn.loaded_tokens
            self.programs.records[turn.program].attained_tokens += computed_tokens
        if turn.fields.is_last_step and ended:
            self._end_program(now_s, turn, request)
        elif ended:
            self._end_in_tool_call(now_s, turn, request)
        else:
            self._end_without_pin(now_s, turn, request)
            self.admission.remove_program(turn.program)
            if turn.link is not None:
                self._prompt_linker.put_back(turn.link)

    def on_freed(self) -> None:
        """The request of the last `on_finish` was freed."""
        self.blocks.evict_first()

    def _end_in_tool_call(self, now_s: float, turn: TurnState, request: Request) -> None:
        """A turn ends in a tool call: decide for how long its KV stays."""
        assert turn.program is not None
        program = turn.program
        tool = turn.fields.this_tool
        if not tool:
            calls = self.tool_calls.read(request, bool(turn.fields.tools), self.ignored)
            tool = self.advisor.slowest(calls)
        tokens = request.num_tokens
        blocks = self.blocks.pinnable(request.request_id, tokens)
        number = self.programs.records[program].turns + 1
        tiers = self.residency.after_eviction(request, tokens)
        ended = FinishedTurn(program, number, tool, tokens, len(blocks), tiers, turn.tenant)
        keep = self.advisor.retain(ended, self.engine_load())
        self.pins.release(now_s, program, PinEnd.SUPERSEDED)
        self.programs.finish_turn(now_s, turn.id, ended, request.block_hashes)
        is_late = self.advisor.returns_late(tool, turn.tenant)
        starts_anew = self.programs.records[program].is_conversation and is_late
        expected_s = self.advisor.expected_s(tool, turn.tenant)
        self.admission.on_pause(now_s, program, tokens, expected_s, starts_anew)
        lengths = (request.num_tokens, request.num_output_tokens)
        self.events.publish(
            TurnFinished(now_s, program, turn.id, tool, *lengths, False, keep, turn.first_token_s)
        )
        self.pins.take(now_s, ended, keep, blocks)
        if self.advisor.mostly_ends(tool, turn.tenant):
            self._evict_first(request)
        if turn.fields.job_id is None:
            matched_tokens = turn.link.tokens if turn.link is not None else 0
            self._prompt_linker.add_turn(
                request, program, turn.program_arrival_s, matched_tokens, turn.fields
            )

    def _end_program(self, now_s: float, turn: TurnState, request: Request) -> None:
        """The program's last turn: none of its KV is needed again."""
        assert turn.program is not None
        self.pins.release(now_s, turn.program, PinEnd.ENDED)
        self._end_without_pin(now_s, turn, request)
        entry = self._drop_program(now_s, turn.program, own_turns=1)
        self.end_claims.claim(entry.id, EndClaim(entry.arrival_s, entry.turns, entry.tenant))
        evicts = self.advisor.features.evict_ended_programs
        if evicts and self.end_claims.is_trusted(entry.tenant):
            self._evict_first(request)

    def _evict_first(self, request: Request) -> None:
        """The KV of the turn's own tokens is hardly needed again: it makes room before any other."""
        shared_tokens = self._shared_prefixes.head(request.block_hashes).tokens
        self.blocks.note_ended(request.request_id, shared_tokens)

    def _end_without_pin(self, now_s: float, turn: TurnState, request: Request) -> None:
        """A turn ended, but not in a tool call."""
        assert turn.program is not None
        self.programs.remove_turn(now_s, turn.id, turn.program)
        self.pins.turn_stopped_waiting(turn.program)
        sizes, last = (request.num_tokens, request.num_output_tokens), turn.fields.is_last_step
        self.events.publish(
            TurnFinished(now_s, turn.program, turn.id, (), *sizes, last, None, turn.first_token_s)
        )

    # a program's end -------------------------------------------------------

    def _drop_program(self, now_s: float, program: ProgramId, own_turns: int = 0) -> Program:
        """Drop the records of a program that ended or was given up.

        `own_turns`: turns that ended with it, and are not counted yet.
        """
        entry = self.programs.drop(program)
        entry.turns += own_turns
        self.admission.remove_program(program, entry.turns)
        self.events.publish(ProgramEnded(now_s, program, entry.turns))
        return entry

    def refresh(self, now_s: float) -> None:
        """Every REFRESH_S: drop programs without a turn for `program_idle_s`, let turns that have waited for
        too long go first, and resize the tiers.

        Of tiers that several engines share, each has the less, the more of them run.
        """
        if now_s < self._refresh_at_s:
            return
        self._refresh_at_s = now_s + REFRESH_S
        for turn in self.turns.values():
            if turn.started_s is None and not turn.held and now_s - turn.queued_s >= LONGEST_WAIT_S:
                turn.overdue_s = turn.arrival_s
                self.turns.to_rekey.add(turn.id)
        capacity = self.admission.capacity
        if self.advisor.resize_tiers(self.residency.capacity_tokens()):
            capacity = self._kv_capacity()
        self.admission.capacity = replace(capacity, gpu_tokens=self.kv_tokens)
        for program in self.programs.idle_programs(now_s, self.config.program_idle_s, self.pins.pinned):
            self._give_up(program)
            self._drop_program(now_s, program)

    def _give_up(self, program: ProgramId) -> None:
        """The program is not expected back from its tool call."""
        entry = self.programs.records.get(program)
        if entry is not None and entry.finished_s is not None:
            self.advisor.give_up(program, entry.tool, entry.turns, entry.tenant)

    # each step -------------------------------------------------------------

    def admit(self, now_s: float, is_running: bool, is_queued: bool) -> None:
        """Start programs for which there is room: their turns take their place in the queue.
        `is_running`: a turn runs. `is_queued`: a turn that is not held waits."""
        for program in self.admission.expire_absent(now_s):
            if self.config.admission:
                self._give_up(program)
        if not self.admission.pending:
            return
        idle, prompt_share = not (is_running or is_queued), self.step_timer.prompt_share
        for program in self.admission.admit(now_s, idle, 1.0 if is_queued else prompt_share):
            entry = self.programs.records.get(program)
            for turn_id in entry.live if entry is not None else [turn_of(program)]:
                turn = self.turns[turn_id]
                turn.held, turn.queued_s = False, now_s
                self.turns.to_rekey.add(turn_id)

    def expire(self, now_s: float) -> None:
        """Release every expired pin, unless its program's next turn is here."""
        for program in self.pins.due(now_s):
            self.pins.release(now_s, program, PinEnd.EXPIRED)

    def release_all(self, now_s: float) -> None:
        """Before a cache reset, sleep or shutdown."""
        for program in list(self.pins.pinned):
            self.pins.release(now_s, program, PinEnd.RESET)

    def on_new_weights(self, now_s: float) -> None:
        """No later turn may use the KV that the GPU holds."""
        self.release_all(now_s)
        self.blocks.forget_all()

    # answers ---------------------------------------------------------------

    @property
    def kv_tokens(self) -> int:
        """How many tokens' KV the GPU holds."""
        return int(self.pool_blocks * self.blocks.tokens_per_block)

    def engine_load(self, away_s: float = 0.0) -> EngineLoad:
        """How busy the engine is, for a program that has been away this long."""
        free, pinned = self.blocks.free_count(), self.pins.pinned_blocks
        is_short = bool(self.turns.refused_memory or self.admission.pending)
        return EngineLoad(self.pool_blocks, free, pinned, is_memory_short=is_short, away_s=away_s)

    def queue_key(self, request: Request) -> tuple[Any, ...]:
        """The request's place in the waiting queue: requests that hold memory first: others wait for it."""
        turn = self.turns[TurnId(request.request_id)]
        preempted = request.num_preemptions > 0  # its status does not show it while its KV is loaded back
        pinned = turn.program in self.pins.pinned
        times_s = (turn.arrival_s, turn.place_s)
        entry = self.programs.queue_entry(
            turn.program, *times_s, turn.priority, preempted, pinned, turn.overdue_s
        )
        order = self.advisor.order(entry)
        holds = request.num_computed_tokens > 0 or request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        unready = turn.held or request.status is RequestStatus.WAITING_FOR_STREAMING_REQ
        return (unready, not holds, *order, turn.arrival_s, turn.id)

    def check(self) -> None:
        """Raise InvariantError unless the tables balance."""
        for table in (self.programs, self.pins, self.admission):
            table.check()

    def _kv_capacity(self) -> KVCapacity:
        return KVCapacity(self.kv_tokens, self.advisor.cheap_tier_tokens())

    def _rekey(self, program: ProgramId) -> None:
        """The place of the program's waiting turns in the queue has changed, preempted ones too."""
        self.turns.to_rekey |= self.programs.records[program].live


def anonymous_program(request: Request) -> ProgramId:
    """A name for a request without a program, as a program that ends with it."""
    return ProgramId(f"~{request.request_id}")


def turn_of(anonymous: ProgramId) -> TurnId:
    """The only turn of an `anonymous_program`."""
    return TurnId(anonymous[1:])
