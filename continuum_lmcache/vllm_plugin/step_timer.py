"""Measures what steps and returns cost, for the rates and the forecasts.

A step lasts from the end of schedule() to its output, or from the output before it where vLLM
schedules ahead. Reads, on vLLM 0.30 to 0.33: SchedulerOutput.num_scheduled_tokens,
.total_num_scheduled_tokens, .scheduled_new_reqs and .scheduled_cached_reqs (num_computed_tokens).
"""

from __future__ import annotations

from typing import NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput

from continuum_lmcache.admission.prefill_chunk import StepTimes
from continuum_lmcache.admission.prefill_share import PrefillShare
from continuum_lmcache.reload.forecast_tracker import ReloadTracker, StepWork, step_wait_s
from continuum_lmcache.reload.rate_calibration import CalibratedCosts
from continuum_lmcache.reload.tier_store import KVTransfer
from continuum_lmcache.telemetry.events import ContextReloaded, EventBus, ProgramEnded
from continuum_lmcache.types import ProgramId, TurnId
from continuum_lmcache.vllm_plugin.memory.residency import ResidencyLookup
from continuum_lmcache.vllm_plugin.requests import TurnState

LEAST_PREFILL_TOKENS = 128  # a step with fewer shows little of the prefill curve
LEAST_PREFILL_SHARE = 0.9  # of a step's tokens: decoding is limited by other things


class StepLaunch(NamedTuple):
    """A step in flight."""

    at_s: float
    waits: bool  # the step waits for its transfers
    is_behind: bool  # another step was in flight at its launch
    prompt_tokens: int
    decoded_each: float  # tokens of each decoding turn; 0: none decodes


class StepTimer:
    """Times steps, learns from their transfers, and completes forecasts of reloads."""

    def __init__(
        self,
        rates: CalibratedCosts,
        events: EventBus,
        residency: ResidencyLookup,
        slack_tokens: int,
    ) -> None:
        self.reloads, self.prompt_time = ReloadTracker(slack_tokens), PrefillShare()
        self.step_times = StepTimes()
        self._rates, self._events, self._residency = rates, events, residency
        events.subscribe(ProgramEnded, lambda event: self.reloads.on_program_end(event.program))
        self._flight: dict[int, StepLaunch] = {}  # by id of the step's output
        self._last_s = 0.0
        self._untimed: set[TurnId] = set()  # turns in flight whose step may wait for an untimed load

    # a turn ------------------------------------------------------------------

    def on_allocated(self, turn: TurnState, prompt_tokens: int) -> None:
        """A turn got its blocks; its gpu_tokens and loaded_tokens are known."""
        if turn.program is not None:
            tokens = (turn.gpu_tokens, turn.loaded_tokens, prompt_tokens)
            self.reloads.on_allocated(turn.id, turn.program, *tokens)

    def on_run(self, turn: TurnState) -> None:
        """The step that was just scheduled has this turn, for the first time or again."""
        if turn.loaded_tokens and not self._residency.times_loads:
            self._untimed.add(turn.id)

    def add_forecast(self, program: ProgramId, context_tokens: int, reload_s: float) -> None:
        self.reloads.add_forecast(program, context_tokens, reload_s)

    def on_turn_end(self, turn: TurnId) -> None:
        """A turn ended or was preempted; its last step may not be reported yet."""
        self.reloads.on_turn_end(turn)

    @property
    def prompt_share(self) -> float:
        """The share of the latest steps' time in which prompts were computed, 0 to 1."""
        return self.prompt_time.share

    # a step ------------------------------------------------------------------

    def on_schedule(
        self, now_s: float, output: SchedulerOutput, prompt_tokens: int, decoding_turns: int
    ) -> None:
        decoded_tokens = output.total_num_scheduled_tokens - prompt_tokens
        decoded_each = decoded_tokens / decoding_turns if decoding_turns else 0.0
        waits, is_behind = self._residency.waits(output), bool(self._flight)
        self._flight[id(output)] = StepLaunch(now_s, waits, is_behind, prompt_tokens, decoded_each)

    def on_step(self, now_s: float, output: SchedulerOutput) -> None:
        launch = self._flight.pop(id(output), None) or StepLaunch(now_s, False, False, 0, 0.0)
        took_s, is_own = self._took_s(now_s, launch)
        self._last_s = now_s
        moved = self._residency.transfers()
        untimed = self._untimed and self._untimed & output.num_scheduled_tokens.keys()
        self._untimed -= untimed
        prefills = launch.prompt_tokens >= LEAST_PREFILL_TOKENS
        self.prompt_time.on_step(took_s, prefills)
        if prefills or self.reloads.is_tracking:
            step = StepWork(took_s, work_of(output))
            for outcome in self.reloads.on_step(step, moved, self._rates.costs.prefill):
                self._events.publish(ContextReloaded(now_s, outcome))
            if prefills and is_own and not untimed:
                self._learn_prefill(step, launch.prompt_tokens, moved)
        if launch.decoded_each:
            self.step_times.on_decodes(took_s, launch.decoded_each)
        for transfer in moved:
            self._rates.observe(transfer)

    def _took_s(self, now_s: float, launch: StepLaunch) -> tuple[float, bool]:
        """A step's seconds, and whether they are its own alone.

        Where the worker runs inside the engine, the launch of a step that waits for its store also waits for
        its forward, and the engine reads the output before it only then. The store has timed such a step.
        """
        took_s = now_s - max(launch.at_s, self._last_s)
        measured_s = self._residency.step_s()
        if not launch.is_behind and not self._flight:
            return took_s, True
        if measured_s is not None:
            return measured_s, True
        return took_s, not (launch.waits or any(later.waits for later in self._flight.values()))

    def _learn_prefill(self, step: StepWork, prompt_tokens: int, moved: list[KVTransfer]) -> None:
        """Learn a step's times; correct the prefill curve by it, if it was prefill for the most part."""
        curve = self._rates.costs.prefill
        in_step_s, weight_s = step_wait_s(moved), sum(step.weights(curve).values())
        if in_step_s < step.seconds / 2:
            self.step_times.on_prompts(step.seconds - in_step_s, prompt_tokens, weight_s)
            if prompt_tokens >= LEAST_PREFILL_SHARE * step.new_tokens:
                self._rates.observe_prefill(step.seconds - in_step_s, curve.fixed_s + weight_s)


def work_of(output: SchedulerOutput) -> dict[TurnId, tuple[int, int]]:
    """A step's tokens by turn: new ones, and those before them."""
    before = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    before |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return {TurnId(turn): (new, before[turn]) for turn, new in output.num_scheduled_tokens.items()}
