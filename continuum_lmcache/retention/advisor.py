"""What a finished turn's KV is worth: learns from tool gaps, queues and loads, answers with a Retention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from continuum_lmcache.admission.context_growth import ContextGrowth
from continuum_lmcache.admission.controller import PendingProgram
from continuum_lmcache.admission.prefill_chunk import PrefillChunkTuner
from continuum_lmcache.config import ContinuumConfig
from continuum_lmcache.reload.cost_model import UNMEASURED, CostModel
from continuum_lmcache.reload.rate_calibration import CalibratedCosts, TierSurvival
from continuum_lmcache.reload.tier_store import KVTransfer
from continuum_lmcache.retention.engine_stats import EvictionStats
from continuum_lmcache.retention.memory_pressure import FULL_PRICE, price
from continuum_lmcache.retention.policies import policy_named
from continuum_lmcache.retention.queue_order import at_the_door
from continuum_lmcache.telemetry.samples import MetricSamples
from continuum_lmcache.tools.call_parser import tool_calls, tool_key
from continuum_lmcache.tools.durations import ToolDurations
from continuum_lmcache.types import (
    EngineLoad,
    FinishedTurn,
    QueueEntry,
    Residency,
    Retention,
    Tier,
    ToolKey,
    TurnId,
)

TYPICAL_TOKENS = 20_000  # at which reloading and computing are compared
CHEAP_SHARE = 0.5  # of the prefill: a reload below this is cheap
EXPECTED_GAPS = 4.0  # times its mean gap: a tool that takes longer may never come back
LEAST_EXPECTED_S = 10.0
COLD_GAP_S = 1.0  # while no gap is known: Exp(1)'s mean, as in the paper's cold start


class RetentionAdvisor:
    """One engine's experience, and the policy that uses it. No clock: times come as values."""

    def __init__(
        self,
        config: ContinuumConfig,
        costs: CostModel = UNMEASURED,
        gaps: ToolDurations | None = None,
        capacity_tokens: Mapping[Tier, int] | None = None,
    ) -> None:
        self.config = config
        self.gaps = gaps if gaps is not None else ToolDurations()
        self.history = EvictionStats()
        self.observed = MetricSamples()
        self.short: set[TurnId] = set()  # waiting turns that were refused memory
        self.rates = CalibratedCosts(costs)
        self.survival = TierSurvival(capacity_tokens or {})
        self._policy = policy_named(config.policy)

    @property
    def admits(self) -> bool:
        """Whether new programs wait until there is room."""
        return self._policy.beyond and self.config.admission

    @property
    def drops_dead(self) -> bool:
        """Whether the KV of a program that is over goes first."""
        return self._policy.beyond and self.config.drop_dead

    @property
    def decodes_first(self) -> bool:
        """Whether a step's budget goes to decodes before any prompt, and is ours to choose where measured."""
        return self._policy.beyond and self.config.measured_chunk

    def chunks(self, most_tokens: int) -> PrefillChunkTuner:
        """The budget of a step, where it is ours to choose and was measured."""
        return PrefillChunkTuner(self.rates.costs.step_s if self.decodes_first else {}, most_tokens)

    @property
    def stops_stores(self) -> bool:
        """Whether storing may be left where it does not pay."""
        return self._policy.beyond and self.config.stop_stores

    def prices(self, context_tokens: int, reload_s: float) -> bool:
        """Whether a pin of this context costs only while a turn waits for memory. Where a tier brings it
        back for little there is little to keep it for: then each second costs one, as in the paper."""
        dear_s = CHEAP_SHARE * self.rates.costs.prefill_s(context_tokens)
        return self._policy.beyond and self.config.priced_pins and reload_s >= dear_s

    def memory(self, turn: TurnId, refused: bool) -> None:
        """A waiting turn was refused its memory; or not, or is gone."""
        (self.short.add if refused else self.short.discard)(turn)

    @property
    def learns_matches(self) -> bool:
        """Whether only that part of a turn is kept which the next prompt is expected to repeat."""
        return self._policy.beyond and self.config.learn_matches

    def cheap_tiers(self) -> dict[Tier, int]:
        """What the tiers have room for, in tokens, without those from which a reload costs nearly as much
        as computing."""
        whole = {t: n for t, n in self.survival.capacity_tokens.items() if n > 0}
        where = {Tier.DRAM: Residency(0, TYPICAL_TOKENS, 0, TYPICAL_TOKENS)}
        where[Tier.SSD] = Residency(0, 0, TYPICAL_TOKENS, TYPICAL_TOKENS)
        dear_s = CHEAP_SHARE * self.rates.costs.prefill_s(TYPICAL_TOKENS)
        return {t: n for t, n in whole.items() if self.rates.costs.reload_s(where[t]) < dear_s}

    def expected_s(self, tool: ToolKey) -> float:
        """For how long a program in a tool call is still counted upon."""
        return expected_s(self.gaps, tool)

    def door_order(self, knock: PendingProgram, growth: ContextGrowth) -> float:
        """Where a new program stands at the door: smallest first."""
        if not self.config.first_prompt_order:
            return knock.arrival_s
        work_s = self.rates.costs.prefill_s(round(growth.final_tokens))
        tokens, usual = knock.prompt_tokens, growth.first_tokens
        wait_s = self.config.max_wait_s
        return at_the_door(knock.arrival_s, tokens, usual, work_s, growth.trust, wait_s, knock.line_s)

    def order(self, standing: QueueEntry) -> tuple[float, ...]:
        """Where a waiting turn stands: smallest first."""
        return self._policy.order(standing)

    def retain(self, now_s: float, turn: FinishedTurn, load: EngineLoad) -> Retention:
        """For how long this turn's KV should stay, never beyond max_ttl_s."""
        keep = self.judged(now_s, turn, load)
        self.observed.kept(turn.tool, keep)
        return keep

    def judged(self, now_s: float, turn: FinishedTurn, load: EngineLoad) -> Retention:
        """The same, for a turn that was counted already."""
        away_s = self.gaps.distribution(turn.tool).mean_s or COLD_GAP_S
        survival = self.survival.chances(turn.residency.total_tokens, away_s, now_s)
        reload_s = self.rates.costs.reload_s(turn.residency, survival)
        priced = self.prices(turn.context_tokens, reload_s)
        load = replace(
            load,
            queue_delay_s=self.history.queue_delay_s,
            eta=self.history.eta,
            reload_s=reload_s,
            price=price(bool(self.short)) if priced else FULL_PRICE,
        )
        keep = self._policy.retain(turn, self.gaps, self.rates.costs, load, self.config)
        return replace(keep, ttl_s=min(keep.ttl_s, self.config.max_ttl_s), reload_s=reload_s)

    def tool(self, text: str) -> ToolKey:
        """What the turn that ends with `text` called: of parallel calls, the one known to be slowest."""
        calls = tool_calls(text)
        if len(calls) < 2:
            return calls[0] if calls else ()
        slowest = self.gaps.slowest(calls)
        return slowest if self.gaps.own(slowest).n else tool_key(text)

    def came_back(self, tool: ToolKey, gap_s: float) -> None:
        """A program returned from `tool` after `gap_s`."""
        self.gaps.observe(tool, gap_s)
        self.observed.gap(tool, gap_s)

    def never_came(self, tool: ToolKey, waited_s: float) -> None:
        """A program was given up on after `waited_s`: the tool took at least that long."""
        self.gaps.censor(tool, waited_s)

    def placed(self, delay_s: float, evicted: bool) -> None:
        """A turn left the queue; `evicted`: its program's KV had to be brought back."""
        self.history.queue_delay(delay_s, evicted)
        self.observed.queued(delay_s, evicted)

    def program_over(self, turns: int) -> None:
        """A program ended after so many turns."""
        self.history.turn_count(turns)

    def moved(self, now_s: float, transfers: Iterable[KVTransfer]) -> None:
        """What the tiers really moved: it corrects their rates, and tells how fast they fill."""
        for transfer in transfers:
            self.rates.observe(transfer)
            self.survival.observe(transfer, now_s)


def expected_s(gaps: ToolDurations, tool: ToolKey) -> float:
    """For how long a program in a call of `tool` is still counted upon, by the gaps that were seen."""
    mean_s = gaps.distribution(tool).mean_s or COLD_GAP_S
    return max(LEAST_EXPECTED_S, EXPECTED_GAPS * mean_s)
