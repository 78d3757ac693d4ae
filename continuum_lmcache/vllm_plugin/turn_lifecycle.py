"""A request's life as a turn of a program: arrived, started, finished; and its KV in between.

The ProgramTable keeps the books, the RetentionAdvisor decides, BlockPins holds the blocks; here they meet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request, RequestStatus

from continuum_lmcache.config import ContinuumConfig
from continuum_lmcache.programs.identity import program_id
from continuum_lmcache.programs.prefix_reuse import PrefixReusePredictor, manner
from continuum_lmcache.programs.prompt_linker import PromptLinker
from continuum_lmcache.programs.table import Program, ProgramTable
from continuum_lmcache.reload.load_policy import Contention, LoadPolicy, nobody
from continuum_lmcache.retention.advisor import RetentionAdvisor
from continuum_lmcache.telemetry.recorder import EventRecorder
from continuum_lmcache.types import (
    EngineLoad,
    FinishedTurn,
    Pin,
    PinEnd,
    ProgramId,
    Retention,
    ToolKey,
    TurnId,
)
from continuum_lmcache.vllm_plugin.admission_gate import AdmissionGate, alone
from continuum_lmcache.vllm_plugin.memory.block_pins import BlockPins
from continuum_lmcache.vllm_plugin.memory.residency import ResidencyLookup
from continuum_lmcache.vllm_plugin.prefix_losses import PrefixLossReporter
from continuum_lmcache.vllm_plugin.requests import TurnState, is_end_of_turn, live_turn, tail_text
from continuum_lmcache.vllm_plugin.step_timer import StepTimer

FORGET_EVERY_S = 10.0


class TurnLifecycle:
    """Everything this package knows about one engine's programs."""

    def __init__(
        self,
        config: ContinuumConfig,
        advisor: RetentionAdvisor,
        recorder: EventRecorder,
        kv_cache_manager: KVCacheManager,
        hash_block_tokens: int,
        block_tokens: int,
        tokenizer: Any,
        supply: ResidencyLookup,
    ) -> None:
        pool_blocks = kv_cache_manager.block_pool.num_gpu_blocks
        budget = int(pool_blocks * config.max_pinned_share)
        self.config, self.advisor, self.recorder, self.supply = config, advisor, recorder, supply
        self.pins = BlockPins(kv_cache_manager, block_tokens)
        kv_tokens = pool_blocks * block_tokens
        others = (lambda: Contention(len(self.turns) - 1, kv_tokens)) if supply.loads_beside_steps else nobody
        self.judge = LoadPolicy(advisor.rates, others, config.load_or_recompute)
        self._slack_tokens = 2 * hash_block_tokens  # a partial block at either end is not "evicted"
        self.step_timer = StepTimer(advisor, recorder, supply, self._slack_tokens)
        tenant_blocks = int(budget * config.max_tenant_share)
        self.ledger = ProgramTable(budget, tenant_blocks, config.max_programs, config.max_ttl_s)
        self.turns: dict[TurnId, TurnState] = {}
        self.moved: set[TurnId] = set()  # waiting turns whose key is stale
        self._preempted: set[TurnId] = set()  # turns that ran, and do not now
        self.ignored: Counter[str] = Counter()
        self._prompt_linker = PromptLinker(config.max_programs, hash_block_tokens)
        self.matching = PrefixReusePredictor(hash_block_tokens, advisor.learns_matches)
        self.crowd = AdmissionGate(advisor, kv_tokens, hash_block_tokens, supply)
        self.losses = PrefixLossReporter(
            recorder, self.judge, hash_block_tokens, tokenizer, config.divergence_texts
        )
        self.pool_blocks = pool_blocks
        self._tokenizer = tokenizer
        self._forget_at_s = 0.0

    # a turn's life ---------------------------------------------------------

    def arrived(self, now_s: float, request: Request) -> None:
        """A request joins the queue: whose turn is it, and what did its tool gap teach?"""
        turn, ignored = live_turn(now_s, request, self.config)
        for field in ignored:
            self.ignored[field] += 1
        if turn.says.job_id is not None:
            self._joins(turn, request, program_id(turn.says.job_id, turn.tenant), None)
        elif self.config.infer_programs and (link := self._prompt_linker.ancestor(request, turn.says)):
            turn.linked_tokens = link.tokens
            self._joins(turn, request, link.program, link.arrival_s)
        else:
            self.crowd.visits(now_s, request)
        self.turns[turn.id] = turn

    def _joins(self, turn: TurnState, request: Request, program: ProgramId, since_s: float | None) -> None:
        """The turn is one of this program's."""
        now_s = turn.arrival_s
        before = self.crowd.endings.back(program)
        since_s = before.arrival_s if before else since_s
        if turn.says.turns and since_s is None:  # under way elsewhere; its age counts with its turns only
            since_s = now_s - turn.says.age_s
        back = self.ledger.arrived(now_s, turn.id, program, turn.tenant, since_s)
        was_elsewhere = turn.says.turns > self.ledger.programs[program].turns
        if back is not None and not was_elsewhere:
            self.advisor.came_back(turn.says.last_tool or back.tool, back.gap_s)
        turn.program, turn.repeats_tokens = program, self.matching.back(program, request.block_hashes)
        self.losses.back(turn, request)
        entry = self.ledger.programs[program]
        turn.program_arrival_s = entry.arrival_s
        entry.turns = max(before.turns if before else entry.turns, turn.says.turns)
        turns = entry.turns or int(since_s is not None)  # an inferred program's first had no program
        turn.held = not self.crowd.arrives(turn, request, program, turns)
        self.recorder.arrived(now_s, program, turn.id, request.num_prompt_tokens)

    def placed(self, request: Request, gpu_tokens: int, loaded_tokens: int) -> None:
        """A waiting request got its blocks: this much of its prompt was found, and where."""
        turn = self.turns.get(TurnId(request.request_id))
        if turn is not None:
            turn.gpu_tokens, turn.loaded_tokens = gpu_tokens, loaded_tokens
            self.judge.placed(turn.id)
            self.step_timer.placed(turn, request.num_prompt_tokens)

    def loaded(self, request: Request) -> None:
        """An asynchronous load has ended; of what was found, as much as is computed now came."""
        turn = self.turns.get(TurnId(request.request_id))
        if turn is not None:
            came = max(0, request.num_computed_tokens - turn.gpu_tokens)
            turn.loaded_tokens = min(turn.loaded_tokens, came)

    def started(self, now_s: float, request: Request) -> None:
        """A turn runs for the first time: it holds its own blocks now, so its program's pin ends."""
        turn = self.turns.get(TurnId(request.request_id))
        if turn is None or turn.started_s is not None:
            return
        turn.started_s = now_s
        self.step_timer.starts(turn)
        served = self.supply.of(request, turn)
        self.supply.count(served)
        if turn.program is None:  # of what the GPU lost, only what a tier brought back is known
            self.crowd.stores.turn(now_s, served.recompute_tokens, served.dram_tokens + served.ssd_tokens)
            return
        self.ledger.started(turn.id, turn.program)
        if not self.ledger.programs[turn.program].turns:
            self.crowd.finds(now_s, request, turn.program, turn.gpu_tokens + turn.loaded_tokens)
        context_tokens = min(self.ledger.programs[turn.program].context_tokens, request.num_prompt_tokens)
        if turn.repeats_tokens is not None:  # what is not asked for was not lost
            context_tokens = min(context_tokens, turn.repeats_tokens)
        self.supply.returned(served, context_tokens)
        lost_tokens = context_tokens - turn.gpu_tokens
        self.crowd.stores.turn(now_s, served.recompute_tokens, max(0, lost_tokens))
        evicted = lost_tokens > self._slack_tokens
        self.advisor.placed(now_s - turn.arrival_s, evicted)
        self.recorder.started(now_s, turn.program, turn.id, served, now_s - turn.arrival_s, evicted)
        self.losses.started(now_s, turn)
        if turn.program in self.ledger.pinned:
            is_reused = self.pins.is_reused(turn.program, request.request_id)
            self.release(now_s, turn.program, PinEnd.REUSED if is_reused else PinEnd.DIVERGED)

    def preempted(self, now_s: float, turn_id: TurnId) -> None:
        """A running turn lost its memory and waits again."""
        turn = self.turns.get(turn_id)
        if turn is not None and turn.program is not None:
            self._preempted.add(turn_id)
            self.step_timer.gone(turn_id)
            self.recorder.preempted(now_s, turn.program, turn_id)

    def resumed(self, now_s: float, scheduled: Container[str], requests: Mapping[str, Request]) -> None:
        """Of the preempted turns, those that run again in this step."""
        for turn_id in [t for t in self._preempted if t in scheduled]:
            self._preempted.discard(turn_id)
            turn, request = self.turns[turn_id], requests[turn_id]
            self.step_timer.starts(turn)
            assert turn.program is not None
            served = self.supply.of(request, turn)
            self.recorder.started(now_s, turn.program, turn_id, served, now_s - turn.arrival_s, False)

    def finished(self, now_s: float, request: Request) -> None:
        """A request is about to be freed: keep its KV, if it ended a turn and that pays."""
        turn = self.turns.pop(TurnId(request.request_id), None)
        if turn is None:
            return
        self._preempted.discard(turn.id)
        self.advisor.memory(turn.id, refused=False)
        self.judge.gone(turn.id)
        self.step_timer.gone(turn.id)
        ended = is_end_of_turn(request)
        if turn.program is None:
            self.crowd.gone(now_s, request)
            if ended and self.config.infer_programs and not turn.says.is_last_step:
                self._prompt_linker.finished(request, alone(request), turn.arrival_s, says=turn.says)
            return
        computed_tokens = request.num_tokens - turn.gpu_tokens - turn.loaded_tokens
        self.ledger.programs[turn.program].attained_tokens += computed_tokens
        if turn.says.is_last_step and ended:
            self._last(now_s, turn, request)
        elif ended:
            self._pause(now_s, turn, request)
        else:
            self.ledger.left(now_s, turn.id, turn.program)
            self.crowd.admission.loses(now_s, turn.program)
            self._record_finish(now_s, turn, request, (), None)

    # a pin's life ----------------------------------------------------------

    def _take(self, now_s: float, pin: Pin, blocks: list[KVCacheBlock]) -> None:
        """Begin a pin: the only way that one begins. Its program's waiting turns take their place with it."""
        self.pins.take(pin.program, blocks)
        self.recorder.pinned(now_s, pin)
        self._pin_changed(pin.program)

    def release(self, now_s: float, program: ProgramId, outcome: PinEnd) -> None:
        """End a pin, if there is one: the only way that one ends. Its program's waiting turns take their
        place without it."""
        if self.ledger.release(program, outcome) is None:
            return
        self.pins.give_back(program)
        self.recorder.unpinned(now_s, program, outcome)
        self._pin_changed(program)

    def open_door(self, now_s: float, is_running: bool, is_queued: bool) -> None:
        """Let programs in for which there is room: their turns take their place in the queue. Whether a turn
        runs, and whether one waits that is not held."""
        idle, prompt_share = not (is_running or is_queued), self.step_timer.prompt_time.now(now_s)
        for program in self.crowd.opens(now_s, idle, 1.0 if is_queued else prompt_share):
            for turn_id in self.ledger.programs[program].live:
                self.turns[turn_id].held = False
                self.moved.add(turn_id)

    def expire(self, now_s: float) -> None:
        """Release every pin whose TTL has run out, unless its program's next turn is here."""
        for program in self.ledger.due(now_s):
            self.release(now_s, program, PinEnd.EXPIRED)

    def forget_idle(self, now_s: float) -> None:
        """Every FORGET_EVERY_S: give up programs not heard of for `program_idle_s`.

        What such a program's last tool took, at least, is still worth knowing.
        """
        if now_s < self._forget_at_s:
            return
        self._forget_at_s = now_s + FORGET_EVERY_S
        for program in self.ledger.forgettable(now_s, self.config.program_idle_s):
            entry = self._over(now_s, program)
            if entry is not None and entry.finished_s is not None:
                self.advisor.never_came(entry.tool, now_s - entry.finished_s)

    def release_all(self, now_s: float) -> None:
        """Before a cache reset, sleep or shutdown."""
        for program in list(self.ledger.pinned):
            self.release(now_s, program, PinEnd.RESET)

    # answers ---------------------------------------------------------------

    def waits(self, turn_id: TurnId) -> bool:
        """Whether the turn is in the queue and has not run yet."""
        turn = self.turns.get(turn_id)
        return turn is not None and turn.started_s is None

    def oldest_returning_wait_s(self, now_s: float) -> float:
        """For how long that later turn of a program has waited which waits for longest; 0: none does."""
        programs = self.ledger.programs
        later = [
            turn.arrival_s
            for turn in self.turns.values()
            if turn.program is not None
            and turn.started_s is None
            and not turn.held
            and programs[turn.program].turns
        ]
        return max(0.0, now_s - min(later, default=now_s))

    def load(self, away_s: float = 0.0) -> EngineLoad:
        """How busy the engine is, for a program that has been away so long."""
        free, pinned = self.pins.free_blocks(), self.ledger.pinned_blocks
        return EngineLoad(self.pool_blocks, free, pinned, away_s=away_s)

    def key(self, request: Request) -> tuple[Any, ...]:
        """The request's place in the waiting queue: those that hold memory first, others wait for it."""
        turn = self.turns[TurnId(request.request_id)]
        preempted = request.num_preemptions > 0  # its status tells no more while its KV is loaded back
        standing = self.ledger.standing(turn.program, turn.arrival_s, turn.priority, preempted)
        order = self.advisor.order(standing)
        holds = request.num_computed_tokens > 0 or request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        return (turn.held, not holds, *order, turn.arrival_s, turn.id)

    # -----------------------------------------------------------------------

    def _last(self, now_s: float, turn: TurnState, request: Request) -> None:
        """The program's last turn: nothing of it will be needed again."""
        assert turn.program is not None
        self.release(now_s, turn.program, PinEnd.ENDED)
        self.ledger.left(now_s, turn.id, turn.program)
        self._record_finish(now_s, turn, request, (), None)
        entry = self._over(now_s, turn.program, own_turns=1)
        if entry is None:
            self.crowd.admission.loses(now_s, turn.program)
            return
        kept_tokens = self.crowd.ends(request, entry)
        if kept_tokens is not None:
            self.pins.bury(request.request_id, kept_tokens)

    def _over(self, now_s: float, program: ProgramId, own_turns: int = 0) -> Program | None:
        """Drop what is known of a program that has ended or was given up, unless another turn of it is live.

        `own_turns`: those that ended with it, and are not counted yet.
        """
        entry = self.ledger.ended(program)
        self.step_timer.returns.over(program)
        self.matching.over(program)
        self.losses.departures.over(program)
        if entry is not None:
            entry.turns += own_turns
            self.advisor.program_over(entry.turns)
            self.crowd.admission.leaves(now_s, program, entry.turns)
            self.recorder.ended(now_s, program)
        return entry

    def _pause(self, now_s: float, turn: TurnState, request: Request) -> None:
        """A turn that ends in a tool call: for how long does its KV stay?"""
        assert turn.program is not None
        program = turn.program
        text = "" if turn.says.this_tool else tail_text(request, self._tokenizer, self.ignored)
        tool = turn.says.this_tool or self.advisor.tool(text)
        sizes = (request.num_prompt_tokens, request.num_tokens)
        kind = (turn.tenant, manner(text))
        tokens = self.matching.left(program, kind, *sizes, request.block_hashes)
        blocks = self.pins.keepable(request.request_id, tokens)
        number, tiers = self.ledger.programs[program].turns + 1, self.supply.if_given_up(request, tokens)
        ended = FinishedTurn(program, number, tool, tokens, len(blocks), tiers)
        keep = self.advisor.retain(now_s, ended, self.load())
        self.release(now_s, program, PinEnd.SUPERSEDED)
        pin = self.ledger.finished(now_s, turn.id, ended, keep)
        self.step_timer.finished(program, tokens, keep.reload_s)
        self.crowd.pauses(now_s, tokens, program, tool)
        self.losses.paused(turn, request, kind[1] == "thought", tiers)
        self._record_finish(now_s, turn, request, tool, keep)
        if pin is not None:
            self._take(now_s, pin, blocks)
        if turn.says.job_id is None:
            self._prompt_linker.finished(
                request, program, turn.program_arrival_s, turn.linked_tokens, turn.says
            )

    def _pin_changed(self, program: ProgramId) -> None:
        """The program's waiting turns have another place in the queue now, preempted ones too."""
        self.moved |= self.ledger.programs[program].live

    def _record_finish(
        self, now_s: float, turn: TurnState, request: Request, tool: ToolKey, keep: Retention | None
    ) -> None:
        assert turn.program is not None
        sizes, last = (request.num_tokens, request.num_output_tokens), turn.says.is_last_step
        self.recorder.finished(now_s, turn.program, turn.id, tool, *sizes, last, keep)
