"""Measures what steps cost, for the rates.

A step lasts from the end of schedule() to its output, or from the output before it where vLLM
schedules ahead. Reads, on vLLM 0.30 to 0.33: SchedulerOutput.num_scheduled_tokens,
.total_num_scheduled_tokens, .scheduled_new_reqs and .scheduled_cached_reqs (num_computed_tokens).
"""

from __future__ import annotations

from typing import NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput

from continuum_lmcache.programs.turns import Turn
from continuum_lmcache.reload.rate_calibration import CalibratedCosts
from continuum_lmcache.steps.step_times import PrefillShare, StepTimes
from continuum_lmcache.types import TurnId
from continuum_lmcache.vllm_plugin.memory.residency import ResidencyLookup

LEAST_PREFILL_TOKENS = 128  # a step with fewer shows little of the prefill curve
LEAST_PREFILL_SHARE = 0.9  # of a step's tokens: decoding is limited by other things


class StepLaunch(NamedTuple):
    at_s: float
    prompt_tokens: int
    decoded_each: float  # tokens of each decoding turn; 0: none decodes


class StepTimer:
    """Times steps, and learns from them and their transfers."""

    def __init__(self, rates: CalibratedCosts, residency: ResidencyLookup) -> None:
        self.prompt_time, self.step_times = PrefillShare(), StepTimes()
        self._rates, self._store, self._knows_sources = rates, residency.store, residency.knows_sources
        self._flight: dict[int, StepLaunch] = {}  # by id of the step's output
        self._last_s = 0.0
        self._untimed: set[TurnId] = set()  # turns in flight whose step may wait for an untimed load

    def on_run(self, turn: Turn) -> None:
        """The step that was just scheduled has this turn, for the first time or again."""
        if turn.loaded_tokens and not self._knows_sources:
            self._untimed.add(turn.id)

    def on_schedule(
        self, now_s: float, output: SchedulerOutput, prompt_tokens: int, decoding_turns: int
    ) -> None:
        decoded_tokens = output.total_num_scheduled_tokens - prompt_tokens
        decoded_each = decoded_tokens / decoding_turns if decoding_turns else 0.0
        self._flight[id(output)] = StepLaunch(now_s, prompt_tokens, decoded_each)

    def on_step(self, now_s: float, output: SchedulerOutput) -> None:
        launch = self._flight.pop(id(output), None) or StepLaunch(now_s, 0, 0.0)
        took_s = now_s - max(launch.at_s, self._last_s)
        self._last_s = now_s
        untimed = self._untimed and self._untimed & output.num_scheduled_tokens.keys()
        self._untimed -= untimed
        prefills = launch.prompt_tokens >= LEAST_PREFILL_TOKENS
        self.prompt_time.on_step(took_s, prefills)
        if prefills and not untimed:
            self._learn_prefill(took_s, output, launch.prompt_tokens)
        if launch.decoded_each:
            self.step_times.on_decodes(took_s, launch.decoded_each)
        for transfer in self._store.transfers():
            self._rates.observe(transfer)

    def _learn_prefill(self, took_s: float, output: SchedulerOutput, prompt_tokens: int) -> None:
        """Learn a step's times; correct the prefill curve by it, if it was prefill for the most part."""
        curve = self._rates.costs.prefill
        weight_s = sum(curve.seconds(*tokens) - curve.fixed_s for tokens in work_of(output))
        if took_s > 0.0:
            self.step_times.on_prompts(took_s, prompt_tokens, weight_s)
            if prompt_tokens >= LEAST_PREFILL_SHARE * output.total_num_scheduled_tokens:
                self._rates.observe_prefill(took_s, curve.fixed_s + weight_s)


def work_of(output: SchedulerOutput) -> list[tuple[int, int]]:
    """Each turn's tokens in a step: new ones, and those before them."""
    before = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    before |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return [(new, before[turn]) for turn, new in output.num_scheduled_tokens.items()]
