"""Once a minute, what is wrong with this engine, in its log: nothing where nothing is.

Adds up a minute of steps to the Window that the core's rules look at (diagnose.py); `continuum-lmcache
status URL` fills the same Window from outside. Needs vLLM's statistics: silent with --disable-log-stats.
Reads, on vLLM 0.30 to 0.33: SchedulerStats.num_running_reqs, .num_waiting_reqs, .kv_cache_usage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger

from continuum_lmcache.diagnose import Window, diagnose
from continuum_lmcache.findings import Finding, Severity
from continuum_lmcache.types import Tier
from continuum_lmcache.vllm_plugin.keeper import Keeper
from continuum_lmcache.vllm_plugin.metrics import Told

WINDOW_S = 60.0
logger = init_logger("vllm.continuum_lmcache")


def say(finding: Finding) -> None:
    """One line. What is only good to know was said at the start."""
    level = {Severity.ERROR: logger.error, Severity.WARNING: logger.warning}.get(finding.severity)
    if level is not None:
        level("%s: %s. To do: %s", finding.name, finding.figure, finding.remedy)


@dataclass(slots=True)
class Sums:
    """What a window's steps add up to."""

    steps: int = 0
    running: int = 0
    waiting: int = 0
    usage: float = 0.0
    pinned_blocks: int = 0
    waits: int = 0
    waited_s: float = 0.0
    lost_tokens: float = 0.0


class Watchman:
    """Adds up what an engine's steps tell, and looks at it once a minute."""

    def __init__(self, keeper: Keeper, say: Callable[[Finding], None] = say) -> None:
        self._keeper, self._say = keeper, say
        self._since_s: float | None = None
        self._sums = Sums()

    def step(self, stats: Any) -> None:
        """A step is over: vLLM's figures of it. In each step, so no more than this."""
        sums = self._sums
        sums.steps += 1
        sums.running += stats.num_running_reqs
        sums.waiting += stats.num_waiting_reqs
        sums.usage += stats.kv_cache_usage
        sums.pinned_blocks += self._keeper.ledger.pinned_blocks

    def told(self, now_s: float, told: Told) -> None:
        """Our figures of the steps since the last call."""
        self._since_s = now_s if self._since_s is None else self._since_s
        waits = [s for samples in told.get("queue_delay", {}).values() for s in samples]
        back = told.get("returned_tokens", {})
        self._sums.waits += len(waits)
        self._sums.waited_s += sum(waits)
        self._sums.lost_tokens += sum(back.get(tier, 0.0) for tier in ("dram", "ssd", "none"))
        seconds = now_s - self._since_s
        if seconds >= WINDOW_S:
            for finding in diagnose(self.window(seconds)):
                self._say(finding)
            self._since_s, self._sums = now_s, Sums()

    def window(self, seconds: float) -> Window:
        """The steps of these seconds, and the work that was done in them. Takes the work away."""
        sums, work = self._sums, self._keeper.appraiser.observed.take_work()
        survival, steps = self._keeper.appraiser.survival, sums.steps
        loads_s = by_tier(work, "load_s")
        return Window(
            seconds,
            running_turns=sums.running / steps,
            waiting_turns=sums.waiting / steps,
            kv_usage=sums.usage / steps,
            pinned_share=sums.pinned_blocks / self._keeper.pool_blocks / steps,
            finished_turns=work.get("finished_turns", 0.0),
            preemptions=work.get("preemptions", 0.0),
            queue_s=sums.waited_s / sums.waits if sums.waits else None,
            prefill_s=work.get("prefill_s", 0.0) + sum(loads_s.values()),  # the rule takes the loads out
            computed_tokens=work.get("prefill_tokens", 0.0),
            working_set_tokens=self._keeper.crowd.door.context_tokens,
            tier_capacity_tokens={t.value: n for t, n in survival.capacity_tokens.items()},
            asked_tokens=sums.lost_tokens if survival.capacity_tokens else None,  # contexts only, no new text
            loaded_tokens=by_tier(work, "loaded_tokens"),
            load_s=loads_s,
            store_s=work.get("store_s", 0.0),
            tier_store_up=float(self._keeper.supply.is_up),
        )


def by_tier(work: Mapping[str, float], what: str) -> dict[str, float]:
    """Sums of one kind of work, by tier."""
    return {t.value: work[f"{what}/{t.value}"] for t in Tier if f"{what}/{t.value}" in work}
