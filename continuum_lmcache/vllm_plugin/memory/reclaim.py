"""Decides which pins are released when a request cannot be placed.

- A running request takes any pin before a request is preempted.
- A waiting request does not take pins of programs whose tool runs, however long the queue: to release pins
  for every waiting head costs 15-25 % of job time. It takes them when nothing runs and no other event will
  free memory (the paper's deadlock rule, §4), or `pin_reclaim_after_s` after it was first in the queue and
  refused.
- It takes the pin of a program whose next turn waits behind it: that turn cannot run first, so
  no request can use the pin's memory. Several returned programs would hold the whole GPU and wait for each
  other.

Pins of the latest-arrived programs go first. No pin is released without use: blocks are counted first,
then freed on trial, and taken back if the request does not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request, RequestStatus

from continuum_lmcache.engine import turn_of
from continuum_lmcache.programs.turns import Turn
from continuum_lmcache.types import Pin, TurnId
from continuum_lmcache.vllm_plugin.assembly import EngineParts
from continuum_lmcache.vllm_plugin.turn_events import TurnEvents

Allocate = Callable[..., KVCacheBlocks | None]


class PinReclaimer:
    """Replaces kv_cache_manager.allocate_slots while schedule() runs in it, with the same signature.

    Between two steps the attribute is as other code left it. Read on vLLM
    0.32: schedule() looks the method up at each call, for the running requests first, and peeks into a
    waiting queue before it allocates for a waiting request. Read too: the coordinator's
    single_type_managers (unchanged from vLLM 0.30 to 0.33; none that keeps all tokens recycles blocks).
    """

    def __init__(
        self, scheduler: Scheduler, parts: EngineParts, events: TurnEvents, clock: Callable[[], float]
    ) -> None:
        self._scheduler, self._events, self._clock = scheduler, events, clock
        engine, self._blocks = parts.engine, parts.blocks
        self._reclaim_after_s = engine.config.pin_reclaim_after_s
        self._programs, self._turns, self._pins = engine.programs, engine.turns, engine.pins
        self._manager = scheduler.kv_cache_manager
        self._stock = self._manager.allocate_slots
        self._block_size = scheduler.block_size
        managers = self._manager.coordinator.single_type_managers
        self._keeps_all_tokens = any(isinstance(m, FullAttentionManager) for m in managers)
        self._in_step = False

    def __enter__(self) -> None:
        """Leave vLLM's own method in place for running requests where memory cannot run short in this step.

        vLLM calls it for each of them, so a wrapper would cost time for each of them.
        """
        self._in_step, self._stock = True, self._manager.allocate_slots
        if self._pins.pinned and self.may_run_short():
            self._replace_allocate_slots(self.allocate_slots)

    def may_run_short(self) -> bool:
        """Whether the running requests could ask for more blocks than are free.

        A decode needs one, and those for its speculative tokens; a prompt needs the step's budget at most.
        Read on vLLM 0.30 to 0.33: Request.is_prefill_chunk, num_spec_tokens, num_lookahead_tokens.
        """
        scheduler, block = self._scheduler, self._block_size
        groups = len(scheduler.kv_cache_config.kv_cache_groups)
        ahead = 1 + -(-(scheduler.num_spec_tokens + scheduler.num_lookahead_tokens) // block)
        left = self._blocks.free_count() - len(scheduler.running) * ahead * groups
        if left >= (scheduler.max_num_scheduled_tokens // block + 1) * groups:
            return False
        return left < 0 or any(request.is_prefill_chunk for request in scheduler.running)

    def __exit__(self, *_: object) -> None:
        self._in_step = False
        self._replace_allocate_slots(self._stock)

    def on_waiting_peeked(self) -> None:
        """vLLM now allocates for waiting requests: each of these calls goes through `allocate_slots`."""
        if self._in_step:
            self._replace_allocate_slots(self.allocate_slots)

    def _replace_allocate_slots(self, allocate_slots: Allocate) -> None:
        self._manager.allocate_slots = allocate_slots  # type: ignore[method-assign]

    def allocate_slots(
        self, request: Request, num_new_tokens: int, *args: Any, **kwargs: Any
    ) -> KVCacheBlocks | None:
        """vLLM's own result; if it is None, release pins where that is allowed and helps."""
        need = self._missing_blocks(request, num_new_tokens, kwargs)
        allocate = partial(self._stock, request, num_new_tokens, *args, **kwargs)
        # vLLM walks over a refused turn's hits in each step; and of windows it frees old blocks first
        is_refused = self._blocks.keeps_all and need > self._blocks.free_count()
        blocks = None if is_refused else allocate()
        if blocks is None and self._pins.pinned:
            blocks = self._reclaim(request, need, allocate)
        if request.status is not RequestStatus.RUNNING:
            self._report(request, blocks, kwargs)
        return blocks

    def _report(self, request: Request, blocks: KVCacheBlocks | None, kwargs: dict[str, Any]) -> None:
        """Report that a waiting request got its blocks, or was refused."""
        turn = self._turns[TurnId(request.request_id)]
        if blocks is None:
            self._turns.refused_memory.add(turn.id)
            return
        self._turns.refused_memory.discard(turn.id)
        turn.refused_s = None  # if it is preempted, its time begins again
        if request.num_computed_tokens:  # blocks for the rest, after an asynchronous load
            self._events.on_load_done(request)
        else:
            hits = kwargs.get("num_new_computed_tokens", 0)
            loads = kwargs.get("num_external_computed_tokens", 0)
            self._events.on_allocated(request, hits, loads)

    def _reclaim(self, request: Request, need: int, allocate: Allocate) -> KVCacheBlocks | None:
        turn = self._turns[TurnId(request.request_id)]
        if self._may_take_any(turn, request):
            own = self._pins.pinned.get(turn.program.id)  # whose prefix it may hit, so it comes last
            victims = [*self._pins.victims(turn.program.id), *([own] if own else ())]
        else:
            victims = self._pins_of_turns_behind(turn, request)
        if not victims:
            return None
        wanted = need - self._blocks.free_count()
        most = sum(victim.blocks for victim in victims)  # at least as many as would become free
        pinned = (victim.block_ids for victim in victims)
        if wanted > most or not self._blocks.can_free(pinned, wanted):
            return None
        return self._release_until_fits(victims, need, allocate)

    def _release_until_fits(self, victims: list[Pin], need: int, allocate: Allocate) -> KVCacheBlocks | None:
        """Free pins' blocks one pin after the other until the request fits; else hold them all again."""
        freed: list[Pin] = []
        for victim in victims:
            self._blocks.release(victim.block_ids)
            freed.append(victim)
            if self._blocks.free_count() < need:
                continue
            blocks = allocate()
            if blocks is not None:
                self._events.on_reclaimed(self._clock(), [pin.program for pin in freed])
                return blocks
        for pin in reversed(freed):
            self._blocks.hold(pin.block_ids)
        return None

    def _may_take_any(self, turn: Turn, request: Request) -> bool:
        if request.status == RequestStatus.RUNNING:
            return True
        now_s = self._clock()
        turn.refused_s = now_s if turn.refused_s is None else turn.refused_s
        if now_s - turn.refused_s > self._reclaim_after_s:
            return True
        return not self._scheduler.running and not self.memory_will_be_freed()

    def memory_will_be_freed(self) -> bool:
        """Whether a KV load is in flight, or a connector still uses a finished request's blocks."""
        scheduler = self._scheduler
        arrived = scheduler.finished_recving_kv_req_ids
        return any(
            (r.status == RequestStatus.WAITING_FOR_REMOTE_KVS and r.request_id not in arrived)
            or r.is_finished()
            for r in scheduler.requests.values()
        )

    def _pins_of_turns_behind(self, turn: Turn, request: Request) -> list[Pin]:
        """The pins of programs whose next turn is here, does not run either, and has a later place."""
        programs = self._programs.records
        if not any(programs[program].is_waiting for program in self._pins.pinned):
            return []  # before all pins are sorted, in each step of a blocked queue
        key, requests = self._events.queue_key, self._scheduler.requests
        own, pins = key(request), self._pins.victims(turn.program.id)
        waiting = [(pin, turn_of(programs[pin.program])) for pin in pins if programs[pin.program].is_waiting]
        return [pin for pin, other in waiting if key(requests[other]) > own]

    def _missing_blocks(self, request: Request, num_new_tokens: int, kwargs: dict[str, Any]) -> int:
        """A lower bound of the free blocks that the request needs, without its prefix hits.

        Where no layer keeps all tokens (windows, states), older tokens' blocks are freed on the way: then
        only the blocks that this step's tokens fill are certain.
        """
        if not self._keeps_all_tokens:
            return max(1, num_new_tokens // self._block_size)
        found: int = kwargs.get("num_new_computed_tokens", 0)
        tokens: int = request.num_computed_tokens + found + num_new_tokens
        tokens += kwargs.get("num_external_computed_tokens", 0)
        if kwargs.get("full_sequence_must_fit"):
            tokens = max(tokens, request.num_tokens)
        held = self._scheduler.kv_cache_manager.get_blocks(request.request_id).blocks
        own = max((len(group) for group in held), default=0)
        return -(-tokens // self._block_size) - own - found // self._block_size
