"""Program order and pins on vLLM's own scheduler, which is subclassed and never copied.

The about thousand lines of schedule() differ in each release. Queues are replaced, since vLLM's `priority`
branch broke six of its own tests. A pin is one more reference on blocks: beside a held request a connector
steps the engine every millisecond.

Overridden, with the same meaning from vLLM 0.30 to 0.33: schedule, add_request, _free_request, _free_blocks,
_update_after_schedule, update_from_output, _update_waiting_for_remote_kv,
has_requests, make_stats, reset_prefix_cache, shutdown, _select_waiting_queue_for_scheduling.
Called: _preempt_request, reset_connector_cache. Read: Request.is_prefill_chunk, num_spec_tokens,
need_mamba_block_aligned_split, resumed_req_ids, num_waiting_for_streaming_input.
Changed: prev_step_scheduled_req_ids, _inflight_prefills, failed_recving_kv_req_ids,
NewRequestData.lora_request.
Before a step, sorted: running; set: max_num_scheduled_tokens.
Wrapped on the instance, while a step is scheduled: kv_cache_manager.allocate_slots.
Replaced after __init__: every RequestQueue attribute. Set there, if vLLM's user has not set it:
scheduler_config.long_prefill_token_threshold.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from continuum_lmcache.policy.interface import StepState
from continuum_lmcache.types import ProgramId, TurnId
from continuum_lmcache.vllm_plugin.assembly import build_parts
from continuum_lmcache.vllm_plugin.hooks import idle_timer, prometheus, weight_updates
from continuum_lmcache.vllm_plugin.hooks.engine_args import load_settings
from continuum_lmcache.vllm_plugin.live import routes
from continuum_lmcache.vllm_plugin.live.programs import LivePrograms
from continuum_lmcache.vllm_plugin.memory.pinned_hits import PinnedHits
from continuum_lmcache.vllm_plugin.memory.reclaim import PinReclaimer
from continuum_lmcache.vllm_plugin.metrics_delta import MetricsDelta
from continuum_lmcache.vllm_plugin.turn_events import TurnEvents
from continuum_lmcache.vllm_plugin.waiting_queue import ProgramQueue

LONGEST_SLEEP_S = 3600.0  # the longest that a thread can wait for differs between systems
REPORT_EVERY_S = 0.5  # more often than any scrape; gathering and sending the figures costs 0.1 ms


class ContinuumMixin(Scheduler):
    """The changes of `--scheduling-policy continuum`, for the sync and the async scheduler alike."""

    clock: Callable[[], float] = staticmethod(time.monotonic)  # the simulator replaces it

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        idle_timer.install()  # the engine exists already, and becomes idle later
        weight_updates.install()
        routes.install()
        config = load_settings(self.vllm_config)
        self._parts = parts = build_parts(self, config, self.clock())
        self._engine, self._blocks, self._step_timer = parts.engine, parts.blocks, parts.step_timer
        self._turns, self._pins, self._programs = parts.engine.turns, parts.engine.pins, parts.engine.programs
        self._prompt_time = self._step_timer.prompt_time
        self._events = events = TurnEvents(parts)
        self._metrics_delta, self._files = MetricsDelta(parts), parts.files
        self.live = LivePrograms(parts, lambda: self.clock())
        self._report_at_s = -math.inf
        self._step_times, self._most_tokens = self._step_timer.step_times, self.max_num_scheduled_tokens
        self._chunk = self._engine.policy.chunk
        stock = self.scheduler_config  # a prompt in one piece never fits a small budget
        in_parts = stock.enable_chunked_prefill and not stock.disable_chunked_mm_input
        self._may_cut = bool(in_parts and not self.need_mamba_block_aligned_split)
        if self._chunk is not None and self._may_cut and not stock.long_prefill_token_threshold:
            # a short prompt runs beside a long one
            stock.long_prefill_token_threshold = self.max_num_scheduled_tokens // 2
        self._prompts_last = False  # among the running ones, in this step
        self._had_prompts = False  # in the last step; without them the requests need no check
        self._running_changed = False
        self._reading_calls = set(config.reading_calls.replace(",", " ").split())
        self._report_due = False  # an idle engine's gauges are out of date
        self._reclaimer = PinReclaimer(self, parts, events, lambda: self.clock())
        if self._blocks.keeps_all:
            PinnedHits(self.kv_cache_manager, self._turns, self._pins)
        self._queues = {
            n: ProgramQueue(events.queue_key, self._reclaimer.on_waiting_peeked)
            for n, q in vars(self).items()
            if isinstance(q, RequestQueue)
        }
        vars(self).update(self._queues)

    # the step ---------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        now_s = self.clock()
        self._report_due = False
        is_queued, prompt_share = any(self._queues.values()), self._prompt_time.share
        self._events.step(now_s, bool(self.running), is_queued, prompt_share)
        self._choose_chunk(prompt_share)
        self._reorder()
        with self._reclaimer:
            return super().schedule(*args, **kwargs)

    def _reorder(self) -> None:
        """Move turns whose place changed; the newest program's request becomes vLLM's victim."""
        for turn_id in self._turns.to_rekey:
            request = self.requests.get(turn_id)
            for queue in self._queues.values():
                if request is not None and request in queue:
                    queue.rekey(request)
        self._turns.to_rekey.clear()
        decodes_first = self._prompts_last and not self._reclaimer.may_run_short()  # no victims then
        if decodes_first or self._running_changed:  # stock FCFS preempts running[-1]
            turns = self._turns
            self.running.sort(
                key=lambda r: (decodes_first and r.is_prefill_chunk, turns[TurnId(r.request_id)].running_rank)
            )
            self._running_changed = decodes_first  # a finished prompt returns to its place

    def _choose_chunk(self, prompt_share: float) -> None:
        """Schedule decodes before prompts, else older programs' prompts take their share of the budget.
        Beside them as many prompt tokens as the policy says."""
        if self._chunk is None:
            return
        running = len(self.running)
        prompts = sum(request.is_prefill_chunk for request in self.running) if self._had_prompts else 0
        self._prompts_last = prompts > 0
        if self._may_cut:
            waiting = sum(map(len, self._queues.values())) - self.num_waiting_for_streaming_input
            each, is_short = 1 + self.num_spec_tokens, self._engine.is_memory_short
            turns = (running, running - prompts, waiting, self._programs.waiting_singles, each)
            state = StepState(self._most_tokens, *turns, prompt_share, is_short, self._step_times)
            self.max_num_scheduled_tokens = min(self._most_tokens, self._chunk(state).tokens)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        now_s = self.clock()
        for new in scheduler_output.scheduled_new_reqs:
            self._events.ran(now_s, self.requests[new.req_id])
            self._running_changed = True
            if (lora := new.lora_request) is not None:  # workers tell adapters apart by their names alone
                new.lora_request = replace(lora, lora_name=f"{lora.lora_name}/{lora.lora_int_id}")
        if scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            self._running_changed = True
        if scheduler_output.preempted_req_ids:
            self._events.preempted(now_s, scheduler_output.preempted_req_ids)
        if self._turns.preempted:
            self._events.resumed(now_s, scheduler_output.num_scheduled_tokens, self.requests)
        tokens, total = scheduler_output.num_scheduled_tokens, scheduler_output.total_num_scheduled_tokens
        self._had_prompts = total > len(tokens)
        turns, decodes = self._decoding(tokens) if self._had_prompts else (len(tokens), total)
        self._step_timer.on_schedule(now_s, scheduler_output, total - decodes, turns)
        self._step_times.on_schedule(total - decodes, decodes)
        super()._update_after_schedule(scheduler_output)

    def _decoding(self, tokens: Mapping[str, int]) -> tuple[int, int]:
        """How many of a step's turns compute no prompt, and how many of its tokens are theirs."""
        scheduled = ((n, self.requests[i]) for i, n in tokens.items())
        decoded = [n for n, r in scheduled if r.num_computed_tokens >= r.num_prompt_tokens]
        return len(decoded), sum(decoded)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        now_s = self.clock()
        if self._turns.without_token:  # before: a turn of one step ends in the next line
            places = model_runner_output.req_id_to_index
            self._turns.on_output(now_s, places, model_runner_output.sampled_token_ids)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._step_timer.on_step(now_s, scheduler_output)  # after: the step's transfers are known now
        return outputs

    # a request's life -------------------------------------------------------

    def add_request(self, request: Request) -> None:
        now_s = self.clock()
        if request.lora_request is not None and request.lora_request.load_inplace:  # from vLLM's Python API
            self.on_new_weights("load_inplace")
        if not self.requests:  # the first step after an idle time has nothing new to report
            self._report_at_s = now_s + REPORT_EVERY_S
        if request.request_id not in self.requests:
            self._events.arrived(now_s, request)
        else:  # a further piece of a streamed input, for which the session's place may have waited
            self._turns.to_rekey.add(TurnId(request.request_id))
            if not request.resumable and (turn := self._turns.get(TurnId(request.request_id))) is not None:
                turn.has_all_input = True  # vLLM ends the session as it ends an aborted request
        super().add_request(request)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._events.ended(self.clock(), request)
        freed = super()._free_request(request, *args, **kwargs)
        self._blocks.on_freed()
        return freed

    def _free_blocks(self, request: Request) -> None:
        self._blocks.take_over(request.request_id)
        super()._free_blocks(request)

    def _update_waiting_for_remote_kv(self, request: Request) -> None:
        """After a load that failed from its first block, keep no memory for its rest and no place before
        requests whose loads have ended.

        vLLM 0.30 to 0.33 keep both. A retry of more than half of the memory never fits beside its own
        reservation, and one that waits for others' reservations blocks these for ever.
        """
        super()._update_waiting_for_remote_kv(request)
        if not request.num_computed_tokens:
            self._hold_no_memory(request)

    def _hold_no_memory(self, request: Request) -> None:
        self._inflight_prefills.discard(request)
        self._turns.to_rekey.add(TurnId(request.request_id))

    # the engine's calls -----------------------------------------------------

    def has_requests(self) -> bool:
        """True also when a pin is due: one step without tokens releases it and reports. And before a pause
        begins, as long as loads and stores hold memory, since no cache can be reset beside them."""
        if super().has_requests():
            return True
        if self.pause_state != PauseState.UNPAUSED:
            return self._reclaimer.memory_will_be_freed()
        due_s = self.next_due_s()
        return self._report_due or (due_s is not None and due_s <= self.clock())

    def idle_s(self) -> float | None:
        """For how long an idle engine may sleep; None: until a request comes."""
        due_s = self.next_due_s()
        if due_s is None or self.pause_state != PauseState.UNPAUSED:
            return None
        return min(max(0.0, due_s - self.clock()), LONGEST_SLEEP_S)

    def next_due_s(self) -> float | None:
        """When a pin expires, though nothing may run then; None: never."""
        return self._pins.next_deadline_s()

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        """vLLM's, with our figures: every REPORT_EVERY_S of a busy engine, and in its last step."""
        stats = super().make_stats(*args, **kwargs)
        if stats is None:
            return None
        now_s = self.clock()
        if now_s < self._report_at_s and (self.running or super().has_requests()):
            return stats
        self._report_at_s = now_s + REPORT_EVERY_S
        figures = self._metrics_delta.delta()
        if self._parts.from_rust:  # nobody would read them on the way
            prometheus.observe(figures, self.parallel_config.data_parallel_index)
            return stats
        return prometheus.attach(stats, figures)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """vLLM's, without pins. With `reset_running_requests` turns that wait with loaded KV lose it, beside
        which vLLM would raise."""
        if reset_connector:
            weight_updates.note(self._parts.new_weights, "reset_prefix_cache")
        self._report_due |= bool(self._pins.pinned)
        self._events.release_all_pins(self.clock())
        if reset_running_requests:
            self._forget_loaded()
        return super().reset_prefix_cache(reset_running_requests, reset_connector)

    def on_new_weights(self, call: str) -> None:
        """Nobody may find KV of the old weights any more, which `call` changes. Running requests go on with
        theirs, as in vLLM. Raises RuntimeError, before the weights change, if a connector says that its tiers
        keep some."""
        if call in self._reading_calls:
            return
        weight_updates.note(self._parts.new_weights, call)
        self._report_due |= bool(self._pins.pinned)
        self._events.release_all_pins(self.clock())
        self._forget_loaded()
        self._blocks.forget_all()
        if self.reset_connector_cache() is False:
            raise RuntimeError("the KV connector kept its cache, so the weights may not change")

    def on_adapter(self, lora_request: LoRARequest) -> None:
        if (note := getattr(self.connector, "on_adapter", None)) is not None:
            note(lora_request)

    def on_release(self, program: str) -> None:
        self._report_due |= bool(self._pins.pinned)
        self._events.released(self.clock(), ProgramId(program))

    def _forget_loaded(self) -> None:
        """Have turns compute what a load has brought, or will, if they have not run since."""
        for request in self.requests.values():
            turn = self._turns.get(TurnId(request.request_id))
            loads = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            is_new = request.status == RequestStatus.WAITING and turn is not None and turn.started_s is None
            if loads:
                self.failed_recving_kv_req_ids.add(request.request_id)
            elif not is_new and request.status != RequestStatus.PREEMPTED:
                continue
            request.num_computed_tokens = 0
            if not loads or request.request_id in self.finished_recving_kv_req_ids:  # else it is written to
                self.kv_cache_manager.free(request)
                self._hold_no_memory(request)

    def shutdown(self) -> None:
        self._events.release_all_pins(self.clock())
        self._files.close()
        super().shutdown()

    # order ------------------------------------------------------------------

    def _select_waiting_queue_for_scheduling(self) -> RequestQueue | None:
        """vLLM up to 0.30 calls this, and would let a skipped newer program pass an older one."""
        queues = [q for q in self._queues.values() if q]
        return min(queues, key=ProgramQueue.head_key) if queues else None


class ContinuumScheduler(ContinuumMixin):
    """For engines that schedule one step at a time."""


class ContinuumAsyncScheduler(ContinuumMixin, AsyncScheduler):
    """For engines that schedule ahead. vLLM's flag and the class must match."""
