"""What a finished turn's KV is worth: learns from tool gaps, queues and loads, answers with a Retention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from continuum_lmcache.config import ContinuumConfig
from continuum_lmcache.costs import UNMEASURED, Costs
from continuum_lmcache.gaps import Gaps
from continuum_lmcache.history import History
from continuum_lmcache.policies import policy_named
from continuum_lmcache.rates import Rates, Survival
from continuum_lmcache.tiers import Transfer
from continuum_lmcache.toolcalls import tool_calls, tool_key
from continuum_lmcache.types import Load, Retention, Standing, Tier, ToolKey, Turn

COLD_GAP_S = 1.0  # while no gap is known: Exp(1)'s mean, as in the paper's cold start


class Appraiser:
    """One engine's experience, and the policy that uses it. No clock: times come as values."""

    def __init__(
        self,
        config: ContinuumConfig,
        costs: Costs = UNMEASURED,
        gaps: Gaps | None = None,
        capacity_tokens: Mapping[Tier, int] | None = None,
    ) -> None:
        self.config = config
        self.gaps = gaps if gaps is not None else Gaps()
        self.history = History()
        self.rates = Rates(costs)
        self.survival = Survival(capacity_tokens or {})
        self._policy = policy_named(config.policy)

    def order(self, standing: Standing) -> tuple[float, ...]:
        """Where a waiting turn stands: smallest first."""
        return self._policy.order(standing)

    def retain(self, now_s: float, turn: Turn, load: Load) -> Retention:
        """For how long this turn's KV should stay, never beyond max_ttl_s."""
        away_s = self.gaps.distribution(turn.tool).mean_s or COLD_GAP_S
        load = replace(
            load,
            queue_delay_s=self.history.queue_delay_s,
            queue_delay_samples=self.history.queue_delay_samples,
            eta=self.history.eta,
            eta_samples=self.history.eta_samples,
            survival=self.survival.chances(turn.residency.total_tokens, away_s, now_s),
        )
        keep = self._policy.retain(turn, self.gaps, self.rates.costs, load, self.config)
        reload_s = self.rates.costs.reload_s(turn.residency, load.survival)
        ttl_s = min(keep.ttl_s, self.config.max_ttl_s)
        return replace(keep, ttl_s=ttl_s, reload_s=reload_s)

    def tool(self, text: str) -> ToolKey:
        """What the turn that ends with `text` called: of parallel calls, the one known to be slowest."""
        calls = tool_calls(text)
        slowest = self.gaps.slowest(calls)
        return slowest if len(calls) < 2 or self.gaps.own(slowest).n else tool_key(text)

    def came_back(self, tool: ToolKey, gap_s: float) -> None:
        """A program returned from `tool` after `gap_s`."""
        self.gaps.observe(tool, gap_s)

    def never_came(self, tool: ToolKey, waited_s: float) -> None:
        """A program was given up on after `waited_s`: the tool took at least that long."""
        self.gaps.censor(tool, waited_s)

    def placed(self, delay_s: float, evicted: bool) -> None:
        """A turn left the queue; `evicted`: its program's KV had to be brought back."""
        self.history.queue_delay(delay_s, evicted)

    def program_over(self, turns: int) -> None:
        """A program ended after so many turns."""
        self.history.turn_count(turns)

    def moved(self, now_s: float, transfers: Iterable[Transfer]) -> None:
        """What the tiers really moved: it corrects their rates, and tells how fast they fill."""
        for transfer in transfers:
            self.rates.observe(transfer)
            self.survival.observe(transfer, now_s)
