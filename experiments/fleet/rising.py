"""Load that rises and falls, and the signal to scale.    python -m experiments.fleet.rising

Skewed programs come faster and faster for an hour, then slower. The product's signal, asked each EVERY_S,
says how many replicas would do. It is followed when it has said so for some time, as autoscalers do: then a
replica is started, or one gets no more turns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean

import numpy as np
import typer

from continuum_lmcache.admission.served import engines_for
from continuum_lmcache.serve.scaling import FULL
from experiments.fleet.replica import Replica, Turn
from experiments.fleet.routers import Ours, Router
from experiments.fleet.run import FleetSetup, run_fleet
from experiments.fleet.table import DEMANDED, MACHINE
from experiments.fleet.workloads import rate_of, skewed
from experiments.sim.result import TurnResult, percentile
from experiments.sim.serving import Setup
from experiments.sim.step_time import Machine
from experiments.tables import markdown
from experiments.workload import ARRIVALS, Program

EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Delays:
    """Of an autoscaler, seconds."""

    up_s: float = 30.0  # for so long the signal asks for more replicas before they are started,
    down_s: float = 300.0  # or for fewer before they are given back
    start_s: float = 120.0  # a replica's start


@dataclass(frozen=True, slots=True)
class Asked:
    """The signal at one moment."""

    at_s: float
    live: float  # programs
    in_time: float  # of one replica, at the mean
    wanted: int  # replicas
    up: int  # replicas that answer


class Scaled(Ours):
    """The product's router over one replica at first, and as many as the signal asks for, up to `most`."""

    def __init__(self, most: int, delays: Delays = Delays()) -> None:  # noqa: B008
        super().__init__()
        self.asked: list[Asked] = []
        self._delays, self._target, self._agreed_s = delays, 1, 0.0
        self._ready_s = [0.0, *[math.inf] * (most - 1)]  # when each replica answers; infinite: it does not

    def place(self, now_s: float, turn: Turn, replicas: Sequence[Replica]) -> int:
        if not self.asked or now_s - self.asked[-1].at_s >= EVERY_S:
            self._follow(now_s, [each for each in replicas if self._ready_s[each.index] <= now_s])
        up = [each for each in replicas if self._ready_s[each.index] <= now_s]
        self.gone = {str(each.index) for each in replicas} - {str(each.index) for each in up}
        return super().place(now_s, turn, up)

    def _follow(self, now_s: float, up: Sequence[Replica]) -> None:
        """Ask the signal. Change the target when it was above, or below, the signal for long."""
        engines = {each.index: each.scheduler._engine for each in up}
        found = {at: each.admission.programs_in_time for at, each in engines.items()}
        in_time = {at: most for at, most in found.items() if most is not None}
        live = {at: float(engines[at].programs.live) for at in in_time}
        full = engines_for(live, in_time) or 0.0
        wanted = min(max(math.ceil(full / FULL), 1), len(self._ready_s))
        before = self.asked[-1].wanted if self.asked else wanted
        mean_in_time = mean(in_time.values() or [0.0])
        self.asked.append(Asked(now_s, sum(live.values()), mean_in_time, wanted, len(up)))
        if not min(before, wanted) > self._target and not max(before, wanted) < self._target:
            self._agreed_s = now_s
        lasts_s = self._delays.up_s if wanted > self._target else self._delays.down_s
        if now_s - self._agreed_s < lasts_s:
            return
        for at in range(len(self._ready_s)):
            if at >= wanted:
                self._ready_s[at] = math.inf
            elif at >= self._target:
                self._ready_s[at] = now_s + self._delays.start_s
        self._target, self._agreed_s = wanted, now_s


def ramp_s(seed: int, highest: float, lasts_s: float) -> Sequence[float]:
    """When programs arrive: `highest` a second in the middle, a tenth of that at the beginning and end."""
    times_s = np.linspace(0.0, lasts_s, 1000)
    rates = highest * (1 - 0.9 * np.abs(2 * times_s / lasts_s - 1))
    expected = np.concatenate(([0.0], np.cumsum(rates[1:] * np.diff(times_s))))
    at = np.cumsum(np.random.default_rng([seed, ARRIVALS]).exponential(size=int(3 * expected[-1])))
    return [float(at_s) for at_s in np.interp(at[at < expected[-1]], expected, times_s)]


def arriving(programs: Sequence[Program], arrivals_s: Sequence[float]) -> tuple[Program, ...]:
    """The programs, one at each time."""
    return tuple(replace(p, arrival_s=s) for p, s in zip(programs, arrivals_s, strict=True))


def p90_s(turns: Sequence[TurnResult], since_s: float, until_s: float) -> float:
    """Of first tokens of the turns that came then; 0 for none."""
    found = [turn.ttft_s for turn in turns if since_s <= turn.arrival_s < until_s]
    return percentile(found, 90) if found else 0.0


def run(
    programs: Sequence[Program], router: Router, replicas: int, machine: Machine = MACHINE
) -> Sequence[TurnResult]:
    """The turns of a run over that many replicas at most, with DRAM of 20 GB each."""
    engine = Setup(policy="continuum", tiers={"dram_gb": 20.0}, machine=machine, merge_steps=32)
    return run_fleet(programs, FleetSetup(engine, (1.0,) * replicas), router).result.turns


def main(
    seed: int = 3, highest: float = 2.0, lasts_s: float = 7200.0, most: int = 6, window_s: float = 300.0
) -> None:
    """Run with the signal and with one replica alone, and print a table in Markdown. `highest`: the load in
    the middle, in times what one replica can do at its best."""
    arrivals_s = ramp_s(seed, rate_of(skewed(DEMANDED, seed), highest, MACHINE, 1.0), lasts_s)
    programs, scaled = arriving(skewed(len(arrivals_s), seed), arrivals_s), Scaled(most)
    turns, alone = run(programs, scaled, most), run(programs, Ours(), 1)
    names = ("live", "in_time", "wanted", "up")
    lines = [["from, s", "live", "in time, each", "wanted", "replicas", "P90, s", "P90 of one alone, s"]]
    for since_s in np.arange(0.0, scaled.asked[-1].at_s, window_s):
        span = since_s, since_s + window_s
        asked = [each for each in scaled.asked if span[0] <= each.at_s < span[1]]
        shown = [mean(getattr(each, name) for each in asked) for name in names if asked]
        shown += [p90_s(turns, *span), p90_s(alone, *span)]
        lines.append([f"{since_s:.0f}", *(f"{value:.1f}" for value in shown)])
    print(markdown([line for line in lines if len(line) == len(lines[0])]))


if __name__ == "__main__":
    typer.run(main)
