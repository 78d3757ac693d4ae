"""Load that rises and falls, and the signal to scale.    python -m experiments.fleet.rising

Skewed programs come faster and faster for an hour, then slower. The product's signal, asked each EVERY_S,
says how many replicas would do. One that is added answers START_S later, one that is given back gets no more
turns. The signal is followed when it has said so for UP_S or DOWN_S, as autoscalers do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean

import numpy as np
import typer

from continuum_lmcache.serve.scaling import replicas_for
from experiments.fleet.replica import Replica, Turn
from experiments.fleet.routers import Ours
from experiments.fleet.run import FleetSetup, run_fleet
from experiments.fleet.table import DEMANDED, MACHINE
from experiments.fleet.workloads import rate_of, skewed
from experiments.sim.result import TurnResult, percentile
from experiments.sim.serving import Setup
from experiments.sim.step_time import Machine
from experiments.tables import markdown
from experiments.workload import ARRIVALS, Program

EVERY_S = 10.0
UP_S, DOWN_S = 30.0, 300.0  # for so long the signal asks for more, or for fewer, before it is followed
START_S = 120.0  # a replica's start


@dataclass(frozen=True, slots=True)
class Asked:
    """The signal at one moment."""

    at_s: float
    live: float
    in_time: float  # of one replica, at the mean
    up: int  # replicas that answer
    wanted: int


class Scaled(Ours):
    """The product's router over one replica at first, and as many as the signal asks for, up to `most`."""

    def __init__(self, most: int, start_s: float = START_S) -> None:
        super().__init__()
        self.asked: list[Asked] = []
        self._start_s = start_s
        self._ready_s = [0.0, *[math.inf] * (most - 1)]  # when each replica answers; infinite: it does not
        self._target, self._differs_since_s = 1, 0.0

    def place(self, now_s: float, turn: Turn, replicas: Sequence[Replica]) -> int:
        up = [replica for replica in replicas if self._ready_s[replica.index] <= now_s]
        if not self.asked or now_s - self.asked[-1].at_s >= EVERY_S:
            self._follow(now_s, up)
        self.gone = [str(at) for at, ready_s in enumerate(self._ready_s) if ready_s == math.inf]
        return super().place(now_s, turn, [replica for replica in up if str(replica.index) not in self.gone])

    def _follow(self, now_s: float, up: Sequence[Replica]) -> None:
        """Ask the signal; change the target if it has differed for long enough in one direction."""
        engines = [replica.scheduler._engine for replica in up]
        found = [(float(engine.programs.live), engine.admission.programs_in_time) for engine in engines]
        known = [(n, most) for n, most in found if most is not None]
        live, in_time = [n for n, _ in known], [most for _, most in known]
        wanted = min(max(math.ceil(replicas_for(live, in_time)), 1), len(self._ready_s))
        last = self.asked[-1].wanted if self.asked else wanted
        if wanted == self._target or (wanted > self._target) != (last > self._target) or last == self._target:
            self._differs_since_s = now_s
        self.asked.append(Asked(now_s, sum(live), mean(in_time or [0.0]), len(up), wanted))
        if now_s - self._differs_since_s < (UP_S if wanted > self._target else DOWN_S):
            return
        for at in range(self._target, wanted):
            self._ready_s[at] = now_s + self._start_s
        for at in range(wanted, self._target):
            self._ready_s[at] = math.inf
        self._target, self._differs_since_s = wanted, now_s


def rising(seed: int, highest: float, lasts_s: float) -> tuple[Program, ...]:
    """Skewed programs; in the middle they bring `highest` times the work that one replica can do at its best,
    at the beginning and the end a tenth of that."""
    times_s = np.linspace(0.0, lasts_s, 1000)
    rates = rate_of(skewed(DEMANDED, seed), highest, MACHINE, 1.0) * (
        1 - 0.9 * np.abs(2 * times_s / lasts_s - 1)
    )
    expected = np.concatenate(([0.0], np.cumsum(rates[1:] * np.diff(times_s))))
    rng = np.random.default_rng([seed, ARRIVALS])
    at = np.cumsum(rng.exponential(size=int(3 * expected[-1])))
    arrivals_s = np.interp(at[at < expected[-1]], expected, times_s)
    programs = skewed(len(arrivals_s), seed)
    return tuple(replace(p, arrival_s=float(s)) for p, s in zip(programs, arrivals_s, strict=True))


def p90_s(turns: Sequence[TurnResult], since_s: float, until_s: float) -> float:
    """Of first tokens of the turns that came then; 0 for none."""
    found = [turn.ttft_s for turn in turns if since_s <= turn.arrival_s < until_s]
    return percentile(found, 90) if found else 0.0


def run(
    programs: Sequence[Program], router: Ours, replicas: int, machine: Machine = MACHINE
) -> list[TurnResult]:
    """The turns of a run over so many replicas, at most."""
    engine = Setup(policy="continuum", tiers={"dram_gb": 20.0}, machine=machine, merge_steps=32)
    return list(run_fleet(programs, FleetSetup(engine, (1.0,) * replicas), router).result.turns)


def main(
    seed: int = 3, highest: float = 2.0, lasts_s: float = 7200.0, most: int = 6, window_s: float = 300.0
) -> None:
    """Run with the signal and with one replica alone, and print a table in Markdown."""
    programs, scaled = rising(seed, highest, lasts_s), Scaled(most)
    turns, alone = run(programs, scaled, most), run(programs, Ours(), 1)
    lines = [
        [
            f"{window_s:.0f} s from",
            "live",
            "in time, each",
            "wanted",
            "replicas",
            "P90, s",
            "P90 of one alone, s",
        ]
    ]
    for at in range(int(lasts_s // window_s)):
        since_s, until_s = at * window_s, (at + 1) * window_s
        asked = [each for each in scaled.asked if since_s <= each.at_s < until_s]
        if not asked:
            continue
        shown = [mean(getattr(each, name) for each in asked) for name in ("live", "in_time", "wanted", "up")]
        p90 = [p90_s(each, since_s, until_s) for each in (turns, alone)]
        lines.append([f"{since_s:.0f}", *(f"{value:.1f}" for value in shown + p90)])
    print(markdown(lines))


if __name__ == "__main__":
    typer.run(main)
